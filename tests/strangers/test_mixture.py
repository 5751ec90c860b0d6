"""A stranger's mixture: phases with other shares, and no index."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from millrace import BlendedDataset, GPTDataset, IndexedDataset, Loader, ResumeError
from millrace.order import Mixture
from millrace.testing import assert_resumes

Phase = tuple[int, Sequence[int]]


class Phases:
    """Each phase, (end, pattern), repeats a pattern of sources until its end."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.phases = phases
        starts = [0, *(end for end, _ in phases)]
        rows = [np.resize(row, end - start) for (end, row), start in zip(phases, starts)]  # noqa: B905
        self.sources = np.concatenate(rows)

    def __len__(self) -> int:
        return len(self.sources)

    def draws(self, sample_numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sources = self.sources[sample_numbers]
        pairs = zip(sample_numbers, sources, strict=True)
        return sources, np.array([np.sum(self.sources[:n] == source) for n, source in pairs])

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        drawn = len(self) if consumed_samples is None else consumed_samples
        starts = [0, *(end for end, _ in self.phases)]
        begun = zip(self.phases, starts, strict=False)
        phases = [[min(end, drawn), list(row)] for (end, row), start in begun if start < drawn]
        return {"kind": "phases", "phases": phases}


@pytest.fixture
def datasets(make_dataset: Callable[..., IndexedDataset]) -> list[GPTDataset]:
    return [
        GPTDataset(make_dataset([500] * 4, name=name), sequence_length=8, seed=1) for name in "abc"
    ]


def test_a_mixture_of_ones_own_is_blended_and_resumes(datasets: list[GPTDataset]) -> None:
    mixture: Mixture = Phases([(20, [0, 0, 1]), (60, [2, 1])])
    blend = BlendedDataset(datasets, order=mixture)  # type: ignore[arg-type]
    numbers = np.arange(len(blend))
    sources, in_source = mixture.draws(numbers)
    for number, source, place in zip(numbers, sources, in_source, strict=True):
        ours = blend.batch([number])["tokens"]
        np.testing.assert_array_equal(ours, datasets[source].batch([place])["tokens"])
    assert assert_resumes(lambda: Loader(blend, micro_batch_size=7), steps_after_resume=2) == 8


def test_a_future_that_changes_resumes_and_a_past_that_changes_does_not(
    datasets: list[GPTDataset],
) -> None:
    def loader_of(*phases: Phase) -> Loader:
        blend = BlendedDataset(datasets, order=Phases(phases))
        return Loader(blend, micro_batch_size=5)

    loader = loader_of((20, [0, 0, 1]), (60, [2, 1]))
    for _ in range(3):
        next(loader)
    state = loader.state_dict()
    other = loader_of((20, [0, 0, 1]), (90, [0, 1, 2]))
    other.load_state_dict(state)
    np.testing.assert_array_equal(next(other)["tokens"], next(loader)["tokens"])
    with pytest.raises(ResumeError, match="phases"):
        loader_of((20, [0, 1, 1]), (60, [2, 1])).load_state_dict(state)
