"""A stranger's field: a weight for each token, which stays with its token whatever moves it."""

from typing import Any

import numpy as np

from millrace import FillInMiddle, Loader
from millrace.feed import SampleOptions, TokenBatch, TokenDataset

EOD, PREFIX, MIDDLE, SUFFIX = 0, 901, 902, 903


class Weighted:
    """Sample k has the tokens 20 k + 1, 20 k + 2, ... of two documents; a token weighs its id."""

    def __len__(self) -> int:
        return 10

    def tokens(self, sample_numbers: Any) -> TokenBatch:
        rows = 20 * np.asarray(sample_numbers)[:, None] + np.arange(1, 18)
        rows[:, 8] = EOD
        tokens = rows.reshape(-1)
        ends = 17 * np.arange(1, len(rows) + 1)
        return TokenBatch(tokens, ends, fields={"weights": ("token", tokens / 100)})

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        return {"kind": "weighted"}


def test_a_weight_follows_its_token() -> None:
    fill = FillInMiddle(
        rate=1, prefix_token=PREFIX, middle_token=MIDDLE, suffix_token=SUFFIX, eod_token=EOD, seed=1
    )
    options = SampleOptions(sequence_length=16, eod_token=EOD)
    dataset = TokenDataset(Weighted(), options, [fill])
    loader = Loader(dataset, micro_batch_size=5, fields=("tokens", "weights", "document_ids"))
    for batch in loader:
        tokens, is_old = batch["tokens"], batch["tokens"] < PREFIX
        assert np.isin([PREFIX, MIDDLE, SUFFIX], tokens).all()
        assert np.array_equal(batch["weights"][is_old], tokens[is_old] / 100)
        assert not batch["weights"][~is_old].any()
        assert batch["weights"].dtype == np.float64
