"""torchtitan's own validator with the loader of the example: torchtitan_cases.py FOLDER."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "trainers"))
import tiny_data
from torchtitan.tools import utils
from torchtitan_loader import MillraceDataLoader

from millrace.errors import ConfigError


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def forward(self, tokens: Any, positions: Any) -> Any:
        self.seen += tokens.tolist()
        return tokens


def validated(steps: int, times: int = 1) -> list[list[int]]:
    """The samples that validations of so many steps of 4 read."""
    from torchtitan.components.validate import Validator

    data = MillraceDataLoader.Config(dataset_path=f"{sys.argv[1]}/text", num_samples=1)
    config, model = Validator.Config(steps=steps, dataloader=data), Model()
    names = ("tokenizer", "metrics_processor", "validation_context")
    rest: dict[str, Any] = {name: MagicMock() for name in names}
    degrees = ("pp_enabled", "dp_enabled", "cp_enabled", "dp_cp_enabled")
    rest |= {"parallel_dims": SimpleNamespace(**dict.fromkeys(degrees, False))}
    rest |= {"parallelism": SimpleNamespace(spmd_backend=""), "dp_world_size": 1, "dp_rank": 0}
    rest |= {"loss_fn": lambda *_: (torch.ones(()), 1), "seq_len": 16, "local_batch_size": 4}
    validator = config.build(**rest)
    for step in range(times):
        validator.validate([model], step)
    return model.seen


if __name__ == "__main__":
    for name in ("torch.utils.tensorboard", "torchtitan.distributed.minimal_async_ep"):
        sys.modules[name] = MagicMock()  # the latter needs a GPU's compiler
    utils.device_type = "cpu"
    tiny_data.make_token_file(tiny_data.arguments(""))
    whole = validated(-1)
    assert len(whole) > 8
    assert validated(2, times=2) == whole[:8] * 2  # each begins anew
    with pytest.raises(ConfigError, match=r"samples end at \d+, before torchtitan's steps"):
        validated(len(whole) // 4 + 1)
