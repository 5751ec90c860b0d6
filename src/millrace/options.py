"""The options of samples that the datasets, the core and its twins share."""

from dataclasses import dataclass
from typing import Any

from millrace.checks import MAX_INT32, check_bool, check_choice, check_int, check_token, shown
from millrace.errors import ConfigError

BOUNDARIES = ("eod", "documents")


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """What a sample looks like. The core reads the fields by name (`cpp/rows.hpp` has the same).

    Args:
        sequence_length: Number of tokens to train on in a sample, 1 to 2**31 - 1.
        add_extra_token: Whether a sample has one token more, the last label. Without it the last
            label is missing and masked.
        eod_token: The end-of-document token; `reset_position_ids` and `eod_mask_loss` need it.
        pad_token: The padding token, never trained on: where a label equals it, the loss mask is 0,
            and it becomes token 0 in tokens and labels. None: every token is trained on.
        reset_position_ids: Whether position ids start again after each EOD.
        eod_mask_loss: Whether the loss mask is 0 where the input is EOD.
        boundaries: What tells documents apart. "eod": the EOD token, wherever it stands, as in
            Megatron-LM. "documents": the parts of the token batch. Then position ids start again
            with each part, the label behind its last token is 0 and masked, and padding is a part
            of its own, whatever the tokens; this replaces the two options before.

    Raises:
        ConfigError: An option outside its limits, or one that needs another.
    """

    sequence_length: int
    add_extra_token: bool = True
    eod_token: int | None = None
    pad_token: int | None = None
    reset_position_ids: bool = False
    eod_mask_loss: bool = False
    boundaries: str = "eod"

    def __post_init__(self) -> None:
        plain: dict[str, Any] = {
            "sequence_length": check_int("sequence_length", self.sequence_length, 1, MAX_INT32),
            "eod_token": check_token("eod_token", self.eod_token),
            "pad_token": check_token("pad_token", self.pad_token),
        }
        check_choice("boundaries", self.boundaries, BOUNDARIES)
        for name in ("add_extra_token", "reset_position_ids", "eod_mask_loss"):
            plain[name] = check_bool(name, getattr(self, name))
        vars(self).update(plain)
        has_eod_rules = self.reset_position_ids or self.eod_mask_loss
        if has_eod_rules and self.eod_token is None:
            raise ConfigError("reset_position_ids and eod_mask_loss look for EOD: give eod_token")
        if has_eod_rules and self.boundaries == "documents":
            raise ConfigError(
                "reset_position_ids and eod_mask_loss belong to boundaries='eod': leave them out; "
                "boundaries='documents' resets position ids and masks between documents"
            )

    def identity(self) -> dict[str, Any]:
        """The options as plain values, for fingerprints; `boundaries` only if it is not "eod"."""
        values = dict(vars(self))
        if values["boundaries"] == "eod":
            del values["boundaries"]
        return values


def choose_options(
    options: SampleOptions | None, single: tuple[Any, ...], *, has_extra: bool = True
) -> SampleOptions:
    """The options of samples, as one object or made of single ones in the order of its fields.

    `has_extra` is the default of the single `add_extra_token`.
    """
    if options is None:
        return SampleOptions(**dict(zip(SampleOptions.__dataclass_fields__, single, strict=True)))
    if not isinstance(options, SampleOptions):
        raise ConfigError(f"options must be SampleOptions, not {shown(options)}")
    defaults = (None, has_extra, None, None, False, False, "eod")
    if any(value is not default for value, default in zip(single, defaults, strict=True)):
        raise ConfigError("give options, or single options of samples: one of the two")
    return options
