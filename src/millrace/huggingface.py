"""Hugging Face's Trainer: a collator, and a check of each resume. It imports transformers."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from millrace.errors import ResumeError
from millrace.outputs import IGNORED
from millrace.torch import collate, to_tensors


def causal_lm_batch(samples: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """The input of a causal model, which `shift_labels` keeps from shifting labels again.

    It is a collator for `MapDataset`, and a `transform` for a `Loader`.
    """
    batch = to_tensors(samples) if isinstance(samples, Mapping) else collate(samples)
    labels = batch["labels"].masked_fill(batch["loss_mask"] == 0, IGNORED)
    shared = {"position_ids": batch["position_ids"], "labels": labels, "shift_labels": labels}
    return {"input_ids": batch["tokens"], **shared}


class ResumeCheck(TrainerCallback, ExportableState):  # type: ignore[misc]
    """A callback that refuses to resume at another sample, or with other data.

    The Trainer skips the checkpoint's steps in the present sizes, and compares no data. This saves
    sizes and the fingerprint of the `MapDataset` in `trainer_state.json`, and compares them when
    training begins, or raises a ResumeError. What was saved without it is not compared.
    """

    def __init__(self) -> None:
        self._attributes: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        """What the Trainer saves."""
        return {"args": {}, "attributes": self._attributes}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        batches, accumulation = kwargs["train_dataloader"], args.gradient_accumulation_steps
        sizes = batches.total_batch_size * accumulation, max(-(-len(batches) // accumulation), 1)
        self._attributes = {"sizes": sizes, "data": batches.dataset.state_dict()}
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())["attributes"]
        if state.global_step == 0 or not saved:
            return
        before, now = (_position(state.global_step, *each) for each in (saved["sizes"], sizes))
        if before != now:
            raise ResumeError(
                f"the checkpoint stands at {before}; the Trainer would resume at {now}, as steps "
                f"have {sizes[0]} samples now, and had {saved['sizes'][0]}: restore this product "
                "of ranks, per_device_train_batch_size and gradient_accumulation_steps"
            )
        batches.dataset.load_state_dict(saved["data"])


def _position(step: int, samples_per_step: int, steps_per_epoch: int) -> str:
    epoch, steps = divmod(step, steps_per_epoch)
    return f"sample {steps * samples_per_step} of epoch {epoch}"
