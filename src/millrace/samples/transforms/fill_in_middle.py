"""Documents permuted for fill-in-the-middle."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from millrace import _native
from millrace.checks import MAX_INT64, real, token, whole
from millrace.errors import ConfigError
from millrace.samples.tokens import Numbers, TokenBatch


@dataclass(frozen=True, kw_only=True)
class FillInMiddle:
    """Permutes documents so that the model learns to fill in their middle.

    A sample is split into documents at each EOD, or is one document without `eod_token`. Each
    document is permuted with probability `rate`: two cuts split its tokens into prefix, middle and
    suffix, any of which may be empty, and they are written as one of

        PSM:  prefix_token, prefix, suffix_token, suffix, middle_token, middle
        SPM:  prefix_token, suffix_token, suffix, middle_token, prefix, middle

    The sample keeps its length: the inserted tokens push out its last tokens. The
    document that does not fit any more is cut first and permuted then, so that a permuted document
    has all of its three inserted tokens. A document of which fewer than 3 tokens would remain is
    not permuted. An EOD stays behind its document.

    The cuts are places between tokens, not characters: there is no tokenizer at training time.

    The draws of document d (0, 1, ...) of sample k are the four words of a counter-based generator,
    `np.random.Philox(key=seed, counter=[d, k, 0, 0]).random_raw(4)`: whether it is permuted,
    whether as SPM, and the two cuts, each uniform over all places.

    Args:
        rate: Probability that a document is permuted, 0 to 1.
        spm_rate: Probability that a permuted document is written as SPM, 0 to 1.
        prefix_token, middle_token, suffix_token: Token ids of the three inserted tokens.
        eod_token: End-of-document token; None: a sample is one document.
        pad_token: Padding token. Padding at the end of a sample makes room for inserted tokens, and
            belongs to no document. None: the samples are not padded.
        seed: Seed of the draws, 0 to 2**63 - 1.

    Raises:
        ConfigError: A rate outside [0, 1], or a token that is not a token id or equals another one.

    Example:
        >>> fill = FillInMiddle(
        ...     rate=1, spm_rate=0, prefix_token=97, middle_token=98, suffix_token=99, seed=3
        ... )
        >>> take, batch = fill(TokenBatch(np.arange(12), np.array([12])), np.array([0]))
        >>> batch.tokens.tolist()
        [97, 0, 1, 2, 99, 7, 8, 98, 3, 4, 5, 6]
        >>> take.tolist()
        [-1, 0, 1, 2, -1, 7, 8, -1, 3, 4, 5, 6]
    """

    rate: float
    spm_rate: float = 0.5
    prefix_token: int
    middle_token: int
    suffix_token: int
    eod_token: int | None = None
    pad_token: int | None = None
    seed: int

    changes_tokens = True

    def __post_init__(self) -> None:
        plain: dict[str, Any] = {"seed": whole("seed", self.seed, 0, MAX_INT64)}
        for name in ("rate", "spm_rate"):
            plain[name] = real(name, getattr(self, name))
            if not 0 <= plain[name] <= 1:  # NaN too
                raise ConfigError(f"{name} is {plain[name]}; 0 to 1 is possible")
        inserted = ("prefix_token", "middle_token", "suffix_token")
        for name in inserted:
            plain[name] = whole(name, getattr(self, name), 0, MAX_INT64)
        for name in ("eod_token", "pad_token"):
            plain[name] = token(name, getattr(self, name))
        names: dict[int, str] = {}
        for name in (*inserted, "eod_token", "pad_token"):
            other = names.setdefault(plain[name], name)
            if other in inserted and other != name:
                raise ConfigError(
                    f"{other} and {name} are both {plain[name]}: a model could not tell them "
                    "apart. Give each a different token id"
                )
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    def __call__(self, batch: TokenBatch, sample_numbers: Numbers) -> tuple[Numbers, TokenBatch]:
        """See `Transform`."""
        tokens, take = _native.fill_in_middle(
            batch.tokens.astype(np.int64, copy=False), batch.ends, sample_numbers, **asdict(self)
        )
        return take, TokenBatch(tokens, batch.ends)

    def fingerprint(self) -> dict[str, Any]:
        """See `Transform.fingerprint`."""
        return {"kind": "fill_in_middle", **asdict(self)}
