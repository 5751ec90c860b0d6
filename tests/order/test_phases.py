"""The instant order, its mixture and its phases: equal to the slow model, sample by sample."""

import random
from typing import Any

import numpy as np
import pytest

from millrace import _native
from millrace.checks import MAX_INT64
from millrace.errors import ConfigError
from millrace.order.instant import InstantOrder, Position
from millrace.order.mixture_tree import ONE, MixtureTree, whole_shares
from millrace.order.phases import Phase, Phases, Source
from tests.order.instant_model import Model

NAMES = ["web", "code", "wiki", "épices", "a", "b/c"]


def random_run(
    rng: random.Random,
) -> tuple[dict[str, Any], list[tuple[int, int, dict[str, float]]]]:
    """Sources, as tokens or (tokens, max_epochs), and phases for the model."""
    names = rng.sample(NAMES, rng.randint(1, len(NAMES)))
    sources = {name: rng.choice([rng.randint(24, 90), rng.randint(24, 900)]) for name in names}
    start, phases = 0, []
    for _ in range(rng.randint(1, 6)):
        part = rng.sample(names, rng.randint(1, len(names)))
        weights = {name: rng.choice([1, 2, 0.1, rng.random() ** 9 + 1e-9]) for name in part}
        phases.append((start, rng.choice([2, 3, 4, 4, 8, 8, 8, 12]), weights))
        start += rng.choice([1, 2, rng.randint(1, 60)])
    capped = {name: (size, rng.randint(1, 9)) for name, size in sources.items()}
    return {name: rng.choice([sources[name]] * 2 + [capped[name]]) for name in names}, phases


def phases_of(sources: dict[str, Any], phases: Any) -> Phases:
    pairs = {
        name: sizes if isinstance(sizes, tuple) else (sizes, None)
        for name, sizes in sources.items()
    }
    return Phases(
        {name: Source(num_tokens=size, max_epochs=cap) for name, (size, cap) in pairs.items()},
        [
            Phase(start=start, sequence_length=n, weights=dict.fromkeys(sources, 0) | weights)
            for start, n, weights in phases
        ],
    )


@pytest.mark.parametrize("seed", range(200))
def test_every_sample_is_the_models(seed: int) -> None:
    rng = random.Random(seed)
    sources, plan = random_run(rng)
    model, mixture, run_seed = Model(seed, sources, plan), phases_of(sources, plan), seed
    orders: dict[tuple[int, str], InstantOrder] = {}
    for number in range(plan[-1][0] + 40):
        try:
            expected = model.draw()
        except ValueError:
            with pytest.raises(ConfigError, match="have reached max_epochs"):
                mixture.stretch_of(number)
            return
        stretch = mixture.stretch_of(number)
        segment = mixture.segments[stretch.phase]
        [source], [own] = mixture.draws(np.array([number]))
        name = mixture.names[source]
        if (segment, name) not in orders:
            size = sources[name]
            orders[segment, name] = InstantOrder(
                size[0] if isinstance(size, tuple) else size,
                name,
                run_seed,
                sequence_length=expected.length,
                position=mixture.position(segment, int(source)),
            )
        [start] = orders[segment, name].spans([own]).offsets
        assert (name, start) == (expected.source, expected.start), number
        leaf = stretch.names.index(name)
        drawn = int(own) - int(stretch.drawn[leaf])
        assert stretch.start + stretch.tree.find(leaf, drawn) == number


def test_batches_and_single_samples_are_the_same() -> None:
    sources, plan = random_run(random.Random(4))
    plan = [(start, 8, weights) for start, _, weights in plan]
    all_sources, numbers = phases_of(sources, plan).draws(np.arange(300))
    for sample in (0, 5, 77, 299):
        [source], [number] = phases_of(sources, plan).draws(np.array([sample]))
        assert (source, number) == (all_sources[sample], numbers[sample])


def test_the_kernel_of_trees_deals_as_python_counts() -> None:
    rng = np.random.default_rng(3)
    for size in (1, 2, 3, 60, 4096):
        weights = (rng.random(size) ** 6 + 1e-12).tolist()
        debts = (rng.uniform(-3, 3, size) * ONE).astype(np.int64).tolist()
        tree = MixtureTree(whole_shares(weights), debts)
        first = int(rng.integers(2**55))
        samples = np.append(np.arange(500), first + np.arange(500))
        leaves, numbers = tree.draws(samples)
        for part, start in ((slice(500), 0), (slice(500, None), first)):
            before, after = np.array(tree.counts(start)), np.array(tree.counts(start + 500))
            np.testing.assert_array_equal(np.bincount(leaves[part], minlength=size), after - before)
            for place in np.arange(1000)[part][::25].tolist():
                assert tree.find(int(leaves[place]), int(numbers[place])) == samples[place]


def test_any_beginning_of_any_source_is_near_its_share() -> None:
    rng = np.random.default_rng(5)
    for size in (2, 7, 300, 4096):
        weights = (rng.random(size) ** rng.integers(1, 9) + 1e-9).tolist()
        shares = whole_shares(weights)
        leaves, numbers = MixtureTree(shares).draws(np.arange(200_000))
        ideal = np.array(shares, np.float64)[leaves] / ONE * np.arange(200_000)
        assert np.abs(numbers - ideal).max() < 2


def test_windows_of_any_number_and_epoch() -> None:
    """Each window once, and the last token is never left out by more than the page says."""
    for num_tokens, length in ((16, 8), (17, 8), (1000, 8), (1000, 333), (5000, 1)):
        order = InstantOrder(num_tokens, "web", 7, sequence_length=length)
        per_epoch = (num_tokens - length) // length
        for epoch in (0, 1, 10**6):
            numbers = epoch * per_epoch + np.arange(per_epoch)
            starts = np.sort(order.spans(numbers).offsets)
            assert np.all(np.diff(starts) == length)
            assert 0 <= starts[0] < length
            assert starts[-1] + length < num_tokens


def test_frozen_samples() -> None:
    order = InstantOrder(10**13, "web", 1234, sequence_length=4096, first_token=5)
    numbers = np.array([0, 1, 2, 10**9, 2**48, 2**60])
    assert order.spans(numbers).offsets.tolist() == FROZEN
    later = InstantOrder(10**6, "web", 1234, sequence_length=512, position=Position(3, 2048, 4096))
    assert later.spans(np.array([0, 1, 4, 1933, 1934])).offsets.tolist() == FROZEN_LATER


FROZEN = [4899697960027, 154217636955, 1271749633115, 8823111730267, 6219999230059, 7916343749351]
FROZEN_LATER = [788647, 789159, 735399, 766631, 767143]


def test_bad_orders_are_refused() -> None:
    for arguments in (
        ((0, 15), 1, (0, 8, 0), 8),  # no window
        ((-1, 100), 1, (0, 8, 0), 8),
        ((0, 100), 1, (0, 12, 0), 8),
        ((0, 100), 1, (0, 8, 4), 8),
        ((0, 100), 1, (0, 8, 96), 8),
        ((0, 100), 1, (-1, 8, 0), 8),
        ((0, 100), 1, (0, 8, 0), 0),
    ):
        with pytest.raises(ValueError, match="tokens"):
            _native.InstantOrder(*arguments, True, 10)
    order = InstantOrder(100, "a", 1, sequence_length=8, num_samples=3)
    with pytest.raises(ValueError, match="sample number is 3"):
        order.spans([3])
    for shares, debts, message in (
        ([ONE, 0], [0, 0], "a share - 1 is -1"),
        ([ONE, 1], [0, 0], "a share - 1 is 0, outside"),
        ([ONE - 1], [0], "1 shares with 1 debts add up to 1099511627775"),
        ([ONE], [0, 0], "1 shares with 2 debts"),
        ([], [], "add up to 0"),
        ([ONE], [ONE << 20], "a debt"),
    ):
        with pytest.raises(ValueError, match=message):
            MixtureTree(shares, debts)
    with pytest.raises(ValueError, match="sample number is -1"):
        MixtureTree([ONE]).draws(np.array([-1]))


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([], "the first phase must start at sample 0"),
        ([(1, 8, {"a": 1})], "the first phase must start at sample 0"),
        (
            [(0, 8, {"a": 1}), (0, 8, {"a": 1})],
            "phase 1 starts at sample 0, the one before it at 0",
        ),
        ([(0, 8, {})], "phase 0 has no source"),
        ([(0, 8, {"a": 0})], "phase 0 has no source"),
        ([(0, 8, {"c": 1})], "phase 0, source c: there are only a, b: add it"),
        ([(0, 8, {"a": float("nan")})], "phase 0, source a: the weight is nan"),
        ([(0, 8, {"a": 1, "b": -1})], "phase 0, source b: the weight is -1"),
        ([(0, 51, {"a": 1})], "phase 0, source a has 100 tokens; samples of 51 tokens need 102"),
        ([(0, 0, {"a": 1})], "sequence_length of phase 0"),
    ],
)
def test_bad_phases_are_named(phases: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        phases_of({"a": 100, "b": 100}, phases)


def test_a_past_does_not_depend_on_the_future() -> None:
    sources = {"a": 1000, "b": (500, 2), "c": 2000}
    plan = [(0, 8, {"a": 1, "b": 2}), (100, 8, {"a": 1, "c": 1})]
    others = [*plan[:1], (100, 4, {"c": 1, "b": 1}), (150, 8, {"a": 1})]
    one, other = phases_of(sources, plan), phases_of(sources, others)
    for drawn, ours in zip(one.draws(np.arange(100)), other.draws(np.arange(100)), strict=True):
        np.testing.assert_array_equal(drawn, ours)
    assert one.past(0) == []
    assert one.past(MAX_INT64) == [(0, 0), (100, 1)]
    assert one.drawn_before(1) == {"b"}
    assert one.drawn_before(101) == {"a", "b"}


def test_a_size_that_cannot_be_read_now_changes_nothing() -> None:
    """A stretch is added as a whole or not at all, and a forked child begins again."""

    class Late(Source):
        fails = 0

        @property
        def num_tokens(self) -> int:  # type: ignore[override]
            if type(self).fails > 0:
                type(self).fails -= 1
                raise OSError("away")
            return 500

    plan = [(0, 8, {"a": 1, "b": 2}), (100, 4, {"a": 1, "b": 1}), (200, 8, {"a": 1})]
    expected = phases_of({"a": 500, "b": (500, 2)}, plan).draws(np.arange(300))
    late = Late.__new__(Late)
    vars(late).update(max_epochs=None, mix_window=1)
    phases = [
        Phase(start=start, sequence_length=n, weights={"a": 0, "b": 0} | weights)
        for start, n, weights in plan
    ]
    mixture = Phases({"a": late, "b": Source(num_tokens=500, max_epochs=2)}, phases)
    for fails in (1, 2, 1, 1):
        Late.fails = fails
        for _ in range(fails):
            with pytest.raises(OSError, match="away"):
                mixture.draws(np.arange(300))
    for drawn, ours in zip(mixture.draws(np.arange(300)), expected, strict=True):
        np.testing.assert_array_equal(drawn, ours)
    mixture.after_fork()
    np.testing.assert_array_equal(mixture.draws(np.arange(300))[1], expected[1])
