"""Megatron-LM's own names, over millrace.

Change only the imports:

    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from millrace.megatron import GPTDataset, GPTDatasetConfig

Files, cached indices, samples and their order are Megatron-LM's, bit for bit (megatron-core
0.16.1). `docs/megatron.md` is the guide, `docs/differences.md` lists where Megatron-LM fails, and
`errors` lists the errors.
"""

import types

from millrace.megatron.base import *  # noqa: F403
from millrace.megatron.blended import *  # noqa: F403
from millrace.megatron.gpt import *  # noqa: F403
from millrace.megatron.helpers import *  # noqa: F403
from millrace.megatron.indexed import *  # noqa: F403
from millrace.megatron.samplers import *  # noqa: F403
from millrace.megatron.sft import *  # noqa: F403
from millrace.megatron.utils import *  # noqa: F403
from millrace.store.layout import MAGIC as _INDEX_HEADER  # noqa: F401

__all__ = ["helpers"] + [  # noqa: F405
    name
    for name, value in list(globals().items())
    if not (name.startswith("__") or isinstance(value, types.ModuleType))
]
