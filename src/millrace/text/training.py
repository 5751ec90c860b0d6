"""The former place of `train_tokenizer`, which has moved to `millrace.encoding.training`."""

import importlib
import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "train_tokenizer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        "millrace.text.training has moved: import train_tokenizer from millrace.encoding.training",
        DeprecationWarning,
        stacklevel=2,
    )
    return importlib.import_module("millrace.encoding.training").train_tokenizer
