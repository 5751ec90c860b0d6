"""PyTorch Lightning: a data module that resumes at the exact next sample. It imports lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

try:
    from lightning.pytorch import LightningDataModule, Trainer
except ImportError:  # the same classes under their older name
    from pytorch_lightning import LightningDataModule, Trainer

from millrace.errors import ConfigError
from millrace.feed import CyclicSampler, Loader
from millrace.feed.state import Position
from millrace.sampling.samplers import num_steps


class DataModule(LightningDataModule):  # type: ignore[misc]
    """The loaders of a run for `Trainer.fit(model, datamodule=...)`.

    Lightning's checkpoints hold the position, as the state of the data module, and
    `Trainer.fit(..., ckpt_path=...)` restores it, also with another number of ranks. It is the
    position after the last batch that was trained on: a batch that was fetched but not finished, as
    in a checkpoint that is saved on an exception, comes again.

    Lightning also saves the state of the training dataloader, which counts only in a checkpoint
    without the data module's: that of a class of another name.

    Args:
        train: Function of the data-parallel rank and the number of ranks that makes the loader of
            the training samples, with `transform=millrace.torch.to_tensors`, once Lightning has
            started its processes.
        validation: The same for the validation samples, which start anew at each validation. None:
            no validation.

    Attributes:
        train_loader: The training loader, once `train_dataloader` was called.
    """

    def __init__(
        self,
        train: Callable[[int, int], Loader],
        *,
        validation: Callable[[int, int], Loader] | None = None,
    ) -> None:
        super().__init__()
        self._train, self._validation = train, validation
        if validation is not None:  # Lightning warns where the method is there without need
            self.val_dataloader = self._val_dataloader
        self.train_loader: Loader | None = None
        self._batches: TrainerBatches | None = None
        self._state: dict[str, Any] | None = None  # to load when the training batches are made

    def train_dataloader(self) -> TrainerBatches:
        """The training batches from the checkpoint's position, or from the first unfinished one."""
        state, self._state = self._state, None
        if state is None and self._batches is None:
            states: Any = getattr(self.trainer.fit_loop, "_combined_loader_states_to_load", ())
            state = states[0] if len(states) == 1 else None
        if self.train_loader is None:
            self.train_loader = self._train(*self._rank_and_size())
            self._check_end(self.train_loader)
        if state is not None:
            self.train_loader.load_state_dict(state)
        elif self._batches is not None:
            self.train_loader.load_state_dict(self._batches.state_dict())
        self._batches = TrainerBatches(self.train_loader, self.trainer, state)
        return self._batches

    def _check_end(self, loader: Loader) -> None:
        trainer = self.trainer
        has_limit = trainer.max_steps != -1 or isinstance(trainer.limit_train_batches, int)
        if isinstance(loader.sampler, CyclicSampler) and not has_limit and trainer.max_epochs != -1:
            raise ConfigError(
                f"a CyclicSampler has no end, so max_epochs={trainer.max_epochs} would never be "
                "reached: set max_steps, limit_train_batches to a number of batches, or "
                "max_epochs=-1"
            )

    def state_dict(self) -> dict[str, Any]:
        if self._state is not None:
            return self._state
        return {} if self._batches is None else self._batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state when `Trainer.fit` asks for the training batches.

        `Trainer.validate` and `test` only take a checkpoint's weights.
        """
        if self.trainer is None or self.trainer.state.fn == "fit":
            self._state = state

    def _val_dataloader(self) -> _Restarting:
        return _Restarting(self._validation(*self._rank_and_size()))  # type: ignore[misc]

    def _rank_and_size(self) -> tuple[int, int]:
        if self.trainer is None:
            raise ConfigError("the data module has no trainer: pass it to Trainer.fit")
        ranks = self.trainer.distributed_sampler_kwargs or {}  # of the data-parallel ranks alone
        return ranks.get("rank", 0), ranks.get("num_replicas", 1)


class TrainerBatches:
    """The batches of a loader, with the state after the last batch that the trainer has finished.

    Lightning may load a checkpoint's state here once more: it is that of the data module.
    """

    def __init__(self, loader: Loader, trainer: Trainer, state: dict[str, Any] | None) -> None:
        self.loader, self._trainer = loader, trainer
        self._starts: list[Position] = []  # of the unfinished batches
        # A state's number of finished batches: Lightning may restore its own only later.
        self._finished: int = (state or {}).get("finished_batches", 0)
        self._drop_finished()
        self._earlier: int = self._finished
        self._first = loader.consumed_samples

    def __iter__(self) -> Iterator[Any]:
        first = start = self.loader._position
        for batch in self.loader:
            self._drop_finished()
            self._starts.append(start)
            yield batch
            start = self.loader._position
        if start == first:  # Lightning would go through empty epochs for ever
            raise ConfigError(
                f"the training samples end at consumed_samples={start.consumed_samples}, before "
                "another epoch: lower max_steps or max_epochs, or give the dataset more num_samples"
            )

    def __len__(self) -> int:
        """Number of batches, earlier ones in sizes of then. Else Lightning reads one ahead."""
        return self._earlier + num_steps(self.loader.sampler, self._first)

    def _drop_finished(self) -> None:
        total = self._trainer.fit_loop.epoch_loop.batch_progress.total
        finished = max(self._finished, int(total.processed))
        del self._starts[: finished - self._finished]
        self._finished = finished

    def state_dict(self) -> dict[str, Any]:
        """The loader's state at the first unfinished batch."""
        self._drop_finished()
        state = self.loader._state_at(self._starts[0] if self._starts else self.loader._position)
        return state | {"finished_batches": self._finished}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)
        self._starts.clear()


class _Restarting:
    """A loader that returns to its first position at each iteration."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._state = loader.state_dict()

    def __iter__(self) -> Iterator[Any]:
        self._loader.load_state_dict(self._state)
        return iter(self._loader)

    def __len__(self) -> int:
        return num_steps(self._loader.sampler, self._state["consumed_samples"])
