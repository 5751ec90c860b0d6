"""Each trainer: killed with SIGKILL, resumed on other ranks, and its losses stay bit for bit."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "trainers"
STEPS = 6


def launch(script: str, modules: str, runs: list[dict[str, Any]], *options: str) -> None:
    launcher = str(Path(__file__).parent / "launch.py")
    command = [sys.executable, *options, launcher, str(EXAMPLES / script)]
    result = subprocess.run(
        [*command, modules, json.dumps(runs)], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-8000:]


def run(folder: Path, ranks: int, *arguments: str, is_killed: bool = False) -> dict[str, Any]:
    options = [str(folder), "--steps", str(STEPS), *arguments]
    return {"ranks": ranks, "arguments": options, "is_killed": is_killed}


def losses(folder: Path, tolerance: float = 0) -> dict[int, str]:
    """The loss of each step; a step that was done twice must have had the same loss."""
    by_step: dict[int, str] = {}
    for line in (folder / "losses.txt").read_text().splitlines():
        step, loss = line.split()
        before = by_step.setdefault(int(step), loss)
        is_same = float.fromhex(before) == pytest.approx(float.fromhex(loss), tolerance, 0)
        assert is_same, f"step {step} differs"
    return by_step


TORCHTITAN = "torchtitan.components.checkpointer,torchtitan.components.dataloader,millrace.torch"

# By script: what to import beforehand, and the ranks of the whole run, of the killed one and of
# the ones that resume it.
CASES = {
    "torch_dataloader.py": ("torch,millrace.torch", (1, 2, 4)),
    "torch_checkpoint.py": ("torch,torch.distributed.checkpoint,millrace.torch", (1, 4, 2)),
    "lightning_trainer.py": ("lightning.pytorch,millrace.lightning,millrace.torch", (1, 2, 1)),
    "huggingface_trainer.py": ("transformers.trainer,millrace.huggingface", (1, 2, 1)),
    "chats_huggingface.py": ("transformers.trainer,millrace.huggingface", (1, 2, 1)),
    "chats_trl.py": ("trl.trainer.sft_trainer,millrace.huggingface", (1, 2, 1)),
    "packed_balance.py": ("torch,millrace.torch", (1, 2, 4)),
    "accelerate_loop.py": ("accelerate,millrace.torch", (1, 2, 4)),
    "jax_loop.py": ("jax,millrace", (1, 4, 2)),
    "megatron_external.py": ("megatron.core,millrace.torch", (1, 2, 4)),
    "torchtitan_loader.py": (TORCHTITAN, (1, 2, 4)),
    "chats_torchtitan.py": (TORCHTITAN, (1, 2, 4)),
}


SUMMED = ("packed_balance.py", "chats_huggingface.py", "chats_trl.py")
"""Their sums depend on the number of ranks in the last bits: losses agree to nine digits."""


@pytest.mark.parametrize("script", CASES)
def test_a_killed_run_resumes_on_other_ranks_bit_for_bit(script: str, tmp_path: Path) -> None:
    modules, (whole, killed, resumed) = CASES[script]
    if (
        "transformers" in modules or "trl" in modules
    ):  # a checkpoint in whose midst the Trainer was killed
        torn = tmp_path / "killed" / "checkpoints" / "checkpoint-4" / "trainer_state.json"
        torn.parent.mkdir(parents=True)
        torn.write_text("{\n")
    runs = [
        run(tmp_path / "whole", whole),
        run(tmp_path / "killed", killed, "--kill-at", "3", is_killed=True),
        run(tmp_path / "killed", resumed),
    ]
    launch(script, modules, runs)
    expected = losses(tmp_path / "whole")
    assert sorted(expected) == list(range(1, STEPS + 1))
    if script not in SUMMED:
        assert losses(tmp_path / "killed") == expected
        return
    actual = losses(tmp_path / "killed", tolerance=1e-9)
    for step, loss in expected.items():
        assert float.fromhex(actual[step]) == pytest.approx(float.fromhex(loss), rel=1e-9)


def test_the_page_shows_the_provider_that_is_run() -> None:
    *_, last = (ROOT / "docs" / "trainers.md").read_text().split("```python\n")
    assert last.split("```")[0] in (EXAMPLES / "megatron_external.py").read_text()


@pytest.mark.parametrize("cases", ["unfinished", "epochs", "sizes"])
def test_lightning_goes_on_after_the_last_finished_batch(cases: str, tmp_path: Path) -> None:
    script = str(Path(__file__).parent / "lightning_cases.py")
    runs = [{"ranks": 1, "arguments": [str(tmp_path), cases]}]
    launch(script, "millrace.lightning,millrace.torch", runs)


def test_huggingface_resumes_at_the_same_sample_or_not_at_all(tmp_path: Path) -> None:
    script = str(Path(__file__).parent / "huggingface_cases.py")
    launch(script, "millrace.huggingface", [{"ranks": 1, "arguments": [str(tmp_path)]}])


def test_torchtitan_validates_on_the_same_samples_each_time(tmp_path: Path) -> None:
    script = str(Path(__file__).parent / "torchtitan_cases.py")
    launch(script, "millrace.torch", [{"ranks": 1, "arguments": [str(tmp_path)]}])
