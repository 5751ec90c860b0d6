"""Laws of the instant order (`docs/instant_order.md`), on its slow model."""

import math
import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from tests.order.instant_model import ONE, Model, Node, Phase, Position, Sample, Stretch, shares

Phases = list[tuple[int, int, dict[str, float]]]
CHAIN = [16, 8, 4, 2, 1]  # each divides those before it


def random_weights(rng: random.Random, names: list[str]) -> dict[str, float]:
    draws = {
        "equal": lambda: 1.0,
        "skewed": lambda: 10 ** rng.uniform(-9, 0),
        "log-normal": lambda: math.exp(rng.gauss(0, 2)),
    }
    draw = draws[rng.choice(list(draws))]
    part = [name for name in names if rng.random() < rng.choice([0.5, 0.9, 1])]
    return {name: draw() for name in part or names[:1]}


def random_phases(
    rng: random.Random, names: list[str], lengths: list[int], most: int = 40, start: int = 0
) -> Phases:
    phases = []
    for length in lengths:
        phases.append((start, length, random_weights(rng, names)))
        start += rng.randint(1, most)
    return phases


def random_sources(rng: random.Random, num: int = 6) -> dict[str, int | tuple[int, int]]:
    return {f"source {number}": rng.randint(32, 300) for number in range(rng.randint(1, num))}


def samples_and_epochs(model: Model, num: int) -> list[tuple[Sample, Position]]:
    pairs = []
    for _ in range(num):
        sample = model.draw()
        pairs.append((sample, model.positions()[sample.source]))
    return pairs


def tokens_by_epoch(pairs: list[tuple[Sample, Position]]) -> dict[tuple[str, int], Counter[int]]:
    tokens: dict[tuple[str, int], Counter[int]] = {}
    for sample, position in pairs:
        epoch = tokens.setdefault((sample.source, position.epoch), Counter())
        epoch.update(range(sample.start, sample.start + sample.length))
    return tokens


@pytest.mark.parametrize(("tokens", "length"), [(2, 1), (16, 8), (23, 8), (100, 7), (1000, 1)])
def test_each_window_of_an_epoch_comes_once(tokens: int, length: int) -> None:
    model = Model(1, {"a": tokens}, [(0, length, {"a": 1})])
    num = (tokens - length) // length
    orders, offsets = [], set()
    for epoch in range(40):
        starts = [model.draw().start for _ in range(num)]
        assert model.positions()["a"] == (epoch, length, num * length)
        assert np.diff(sorted(starts)).tolist() == [length] * (num - 1)
        assert min(starts) < length
        assert max(starts) + length < tokens  # the last label is a token, too
        orders.append(starts)
        offsets.add(min(starts))
    assert len(offsets) > 1 or length == 1
    assert num < 10 or all(a != b for a, b in pairwise(orders))


@pytest.mark.parametrize("seed", range(60))
def test_no_token_comes_twice_in_an_epoch(seed: int) -> None:
    rng = random.Random(seed)
    sources = random_sources(rng)
    lengths = [rng.choice([16, 12, 8, 6, 5, 4, 3, 2, 1]) for _ in range(rng.randint(1, 20))]
    model = Model(seed, sources, random_phases(rng, list(sources), lengths))
    pairs = samples_and_epochs(model, 400)
    epochs = tokens_by_epoch(pairs)
    assert all(set(tokens.values()) == {1} for tokens in epochs.values())
    last: dict[str, Position] = {}
    repeated = dict.fromkeys(sources, 0)
    for sample, position in pairs:
        before = last.get(sample.source, Position(0, 0, 0))
        if position.epoch > before.epoch:
            left = (sources[sample.source] // before.window - 1) * before.window - before.past
            assert position.epoch == before.epoch + 1
            assert left < sample.length or before.window % sample.length
            if left and before.window % sample.length:
                repeated[sample.source] += epochs[sample.source, before.epoch].total()
        last[sample.source] = position
    assert model.repeated() == repeated
    assert list(model.counts().values()) == [
        sum(sample.source == name for sample, _ in pairs) for name in sources
    ]


@pytest.mark.parametrize("seed", range(60))
def test_an_epoch_is_whole_where_lengths_stay_or_divide(seed: int) -> None:
    rng = random.Random(seed)
    sources = random_sources(rng)
    lengths = sorted((rng.choice(CHAIN) for _ in range(rng.randint(1, 20))), reverse=True)
    model = Model(seed, sources, random_phases(rng, list(sources), lengths))
    pairs = samples_and_epochs(model, 400)
    first = {}
    for sample, position in pairs:
        first.setdefault((sample.source, position.epoch), position.window)
    for (name, epoch), tokens in tokens_by_epoch(pairs).items():
        assert set(tokens.values()) == {1}
        if epoch < model.positions()[name].epoch:
            window = first[name, epoch]
            assert len(tokens) == (sources[name] - window) // window * window
    assert not any(model.repeated().values())


def test_longer_samples_of_the_window_follow_shorter_ones() -> None:
    sources = {"a": 8 * 21}
    model = Model(3, sources, [(0, 8, {"a": 1}), (4, 2, {"a": 1}), (7, 4, {"a": 1})])
    pairs = samples_and_epochs(model, 40)
    assert [position.past for _, position in pairs[6:9]] == [38, 44, 48]  # 2 tokens are left out
    assert [position.epoch for _, position in pairs].index(1) == 7 + (160 - 40) // 4
    assert set(tokens_by_epoch(pairs)["a", 0].values()) == {1}
    assert not model.repeated()["a"]
    model = Model(3, sources, [(0, 8, {"a": 1}), (4, 3, {"a": 1})])
    assert samples_and_epochs(model, 5)[-1][1] == (1, 3, 3)
    assert model.repeated()["a"] == 32


def test_a_length_at_which_nothing_is_drawn_changes_nothing() -> None:
    weights = {"a": 1e-9, "b": 1.0}
    alone = {"a": 1.0}
    phases: Phases = [(0, 8, alone), (3, 5, weights), (6, 8, alone)]
    model = Model(3, {"a": 100, "b": 100}, phases)
    assert [p for s, p in samples_and_epochs(model, 7) if s.source == "a"][-1] == (0, 8, 32)


def deviations(model: Model) -> tuple[float, float]:
    """Draws all phases but the last; the worst distance from the shares in a phase and in all."""
    totals = dict.fromkeys(model.sources, 0.0)
    in_phase = overall = 0.0
    for phase, following in pairwise(model.phases):
        weights = shares(phase.weights)
        names = {name: number for number, name in enumerate(weights)}
        num = following.start - phase.start
        draws = np.zeros((num, len(names)))
        draws[np.arange(num), [names[model.draw().source] for _ in range(num)]] = 1
        part = np.array([weights[name] for name in names]) / ONE
        errors = part * np.arange(1, num + 1)[:, None] - draws.cumsum(axis=0)
        before = np.array([totals[name] for name in names])
        in_phase = max(in_phase, np.abs(errors).max())
        overall = max(overall, np.abs(errors + before).max())
        totals.update(zip(names, before + errors[-1], strict=True))
    model.draw()  # a sample of the last phase ends the stretch before it
    debts = [source.debt / ONE for source in model.sources.values()]
    np.testing.assert_allclose(debts, [totals[name] for name in model.sources], atol=1e-6)
    return in_phase, overall


@pytest.mark.parametrize("seed", range(50))
def test_shares_hold_in_every_beginning_of_every_phase(seed: int) -> None:
    rng = random.Random(seed)
    num = 500 if seed < 3 else rng.randint(1, 60)
    names = [f"{number}" for number in range(num)]
    lengths = [1] * rng.randint(2, 21)
    phases = random_phases(rng, names, lengths, rng.choice([1, 5, 50, 300]))
    model = Model(seed, dict.fromkeys(names, 300), phases)
    in_phase, overall = deviations(model)
    assert in_phase <= 2
    assert overall <= 3


def worst_of_histories(next_weights, num_phases: int, num_samples: int) -> tuple[float, float]:
    """Of a history whose phases may depend on what was drawn: all but the last are in the past."""
    names = [f"{number}" for number in range(1001)]
    phases: Phases = []
    debts = dict.fromkeys(names, 0.0)
    worst = (0.0, 0.0)
    for number in range(num_phases):
        phases.append((number * num_samples, 1, next_weights(number, debts)))
        following = (len(phases) * num_samples, 1, {"0": 1.0})
        model = Model(1, dict.fromkeys(names, 200), [*phases, following])
        worst = deviations(model)
        debts = {name: source.debt / ONE for name, source in model.sources.items()}
    return worst


def owed(debts: dict[str, float], names: range) -> list[str]:
    return sorted(map(str, names), key=lambda name: -debts[name])


def test_shares_hold_where_phases_are_against_them() -> None:
    """Each of these broke an earlier rule for debts: shares were off by 3 to 90 samples."""
    fresh = lambda number, _: {"0": 0.81, str(number + 1): 0.19}  # noqa: E731
    away = lambda number, _: {"0": 0.55, "1": 0.45} if number % 2 else {"2": 1.0}  # noqa: E731

    def many_and_one(number: int, debts: dict[str, float]) -> dict[str, float]:
        if number == 0:
            return dict.fromkeys(map(str, range(1, 1001)), 1.0)
        return {"0": 500.0} | {name: 1.0 for name in map(str, range(1, 1001)) if debts[name] > 0}

    def most_owed(number: int, debts: dict[str, float]) -> dict[str, float]:
        heavy = 60 - 3 * number
        return {
            name: 1.0 if place < heavy else 1e-9
            for place, name in enumerate(owed(debts, range(60)))
        }

    for weights, num_phases, num_samples in (
        (fresh, 20, 1), (away, 20, 1), (many_and_one, 2, 500), (most_owed, 20, 30),
    ):  # fmt: skip
        in_phase, overall = worst_of_histories(weights, num_phases, num_samples)
        assert in_phase <= 2
        assert overall <= 3


def test_no_rule_holds_shares_where_each_source_goes_once_it_is_drawn() -> None:
    def undrawn(number: int, debts: dict[str, float]) -> dict[str, float]:
        return dict.fromkeys(owed(debts, range(21))[: 21 - number], 1.0)

    _, overall = worst_of_histories(undrawn, 20, 1)
    assert overall == pytest.approx(sum(1 / number for number in range(2, 22)), abs=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_levels_are_the_counts_of_the_page(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"{number}" for number in range(rng.randint(2, 30))]
    weights = {name: 10 ** rng.uniform(-3, 0) for name in names}
    model = Model(0, dict.fromkeys(names, 100), [(0, 1, weights)])
    for source in model.sources.values():
        source.debt = int(rng.gauss(0, 2) * ONE)
    stretch = Stretch(weights, model.sources)
    num = 500
    draws = [stretch.draw() for _ in range(num)]

    def check(node: Node, numbers: list[int]) -> None:
        """M4 and M5 for the numbers of a node's samples in the stretch."""
        if not (node.left and node.right):
            assert numbers == [number for number in range(num) if draws[number] == node.name]
            return
        c = min(max(3 * (node.left.debt - node.right.debt) // 16, -(2**39)), 2**39 - 1)
        left, right = [], []
        for t, number in enumerate(numbers):
            counts = [
                (node.left.share * t * ONE // node.share + c + 2**39) // ONE for t in (t, t + 1)
            ]
            assert (len(left), len(right)) == (counts[0], t - counts[0])
            (left if counts[1] > counts[0] else right).append(number)
        check(node.left, left)
        check(node.right, right)

    check(stretch.root, list(range(num)))


def test_shares_are_whole_numbers_of_2_to_the_40() -> None:
    assert shares({"b": 1, "a": 1, "c": 1}) == {"a": ONE // 3 + 1, "b": ONE // 3, "c": ONE // 3}
    assert shares({"a": 1e-300, "b": 1e300}) == {"a": 1, "b": ONE - 1}


def test_equal_sources_are_drawn_by_name() -> None:
    """By hand: the first takes what 2^40 / 3 leaves; (b, c) and ((a, b), (c, d)) are the trees."""
    for names, expected in (("ab", "abab"), ("abc", "bacbac"), ("abcd", "acbdacbd")):
        model = Model(1, dict.fromkeys(names, 50), [(0, 2, dict.fromkeys(names, 0.5))])
        assert "".join(model.draw().source for _ in expected) == expected


def random_history(rng: random.Random) -> tuple[dict[str, int | tuple[int, int]], Phases]:
    sources = random_sources(rng)
    for name in list(sources)[1:]:
        if rng.random() < 0.5:
            sources[name] = (sources[name], rng.randint(1, 4))
    lengths = [rng.choice([16, 8, 8, 5, 4, 2]) for _ in range(rng.randint(1, 8))]
    phases = random_phases(rng, list(sources), lengths)
    first = next(iter(sources))  # which has no cap
    return sources, [(start, length, weights | {first: 0.1}) for start, length, weights in phases]


@pytest.mark.parametrize("seed", range(60))
def test_the_past_does_not_change(seed: int) -> None:
    rng = random.Random(seed)
    sources, phases = random_history(rng)
    cut = rng.randint(1, 150)
    past = [phase for phase in phases if phase[0] < cut]
    lengths = [rng.choice([16, 8, 4, 3]) for _ in range(rng.randint(0, 3))]
    future = random_phases(rng, [*sources, "new"], lengths, start=cut)
    model = Model(seed, sources, phases)
    before = [model.draw() for _ in range(cut)]
    other = Model(seed, {"new": 500, **sources}, past + future)
    assert [other.draw() for _ in range(cut)] == before
    assert other.positions() == model.positions() | {"new": None}
    draws = model.counts() | {"new": 0}
    for _ in range(20):
        try:
            sample = other.draw()
        except ValueError:  # the new phase has only sources at their caps
            return
        assert sample.draw == draws[sample.source]
        draws[sample.source] += 1


@pytest.mark.parametrize("seed", range(40))
def test_a_skip_moves_no_other_sample(seed: int) -> None:
    rng = random.Random(seed)
    sources, phases = random_history(rng)
    ends = sorted(rng.sample(range(150), 6))
    skips = tuple(zip(ends[::2], ends[1::2], strict=True))
    model, skipping = Model(seed, sources, phases), Model(seed, sources, phases, skips[::-1])
    every = [model.draw() for _ in range(160)]
    skipped = {number for start, stop in skips for number in range(start, stop)}
    kept = [sample for sample in every if sample.number not in skipped]
    assert [skipping.draw() for _ in kept] == kept


@pytest.mark.parametrize("seed", range(40))
def test_the_order_of_sources_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    sources, phases = random_history(rng)

    def shuffled(items: dict) -> dict:
        return dict(rng.sample(list(items.items()), len(items)))

    model = Model(seed, sources, phases)
    other = Model(seed, shuffled(sources), [(*phase[:2], shuffled(phase[2])) for phase in phases])
    assert [model.draw() for _ in range(200)] == [other.draw() for _ in range(200)]


def test_seeds_and_names_give_other_orders() -> None:
    def starts(seed: int, name: str) -> list[int]:
        model = Model(seed, {name: 1000}, [(0, 4, {name: 1})])
        return [model.draw().start for _ in range(50)]

    orders = [starts(1, "a"), starts(2, "a"), starts(1, "b"), starts(1, "ä")]
    assert all(a != b for a, b in pairwise(orders))


def test_a_cap_ends_a_source_at_its_last_window() -> None:
    model = Model(1, {"a": (85, 2), "b": 1000, "c": 1000}, [(0, 4, {"a": 2, "b": 1, "c": 1})])
    samples = [model.draw() for _ in range(200)]
    draws = [sample.number for sample in samples if sample.source == "a"]
    assert len(draws) == 2 * 20
    assert draws[-1] in (78, 79)
    after = Counter(sample.source for sample in samples[draws[-1] + 1 :])
    assert abs(after["b"] - after["c"]) <= 2
    assert set(after) == {"b", "c"}


def test_another_length_ends_a_source_in_its_last_epoch() -> None:
    both = {"a": 1.0, "b": 1.0}
    phases: Phases = [(0, 4, both), (10, 3, both), (20, 2, both)]
    model = Model(1, {"a": (44, 1), "b": 1000}, phases)
    names = [model.draw().source for _ in range(60)]
    assert set(names[10:20]) == {"b"}  # 3 does not divide a's windows, but 2 does
    assert names.count("a") == 5 + (40 - 20) // 2


def test_errors() -> None:
    one = {"a": 1.0}
    sources: dict[str, int | tuple[int, int]] = {"a": 16, "b": (16, 1)}
    Model(1, sources, [(0, 8, one)])
    for phases, skips, message in (
        ([(0, 9, one)], (), "phase 0: 'a' has fewer than 2 \\* 9 tokens"),
        ([(1, 8, one)], (), "phases start at"),
        ([(0, 8, one), (5, 8, one), (5, 4, one)], (), "phases start at"),
        ([], (), "phases start at"),
        ([(0, 8, {})], (), "weights are positive"),
        *(([(0, 8, {"a": bad})], (), "are positive") for bad in (0, -1, math.inf, math.nan)),
        ([(0, 8, {"c": 1})], (), "no source is called 'c'"),
        ([(0, 8, one)], ((3, 5), (4, 8)), "skips overlap"),
        ([(0, 8, one)], ((3, 3),), "are empty"),
    ):
        with pytest.raises(ValueError, match=message):
            Model(1, sources, phases, skips)
    model = Model(1, sources, [(0, 8, {"b": 1}), (2, 8, one)])
    model.draw()
    with pytest.raises(ValueError, match="sample 1: all sources of its phase are at their caps"):
        model.draw()
    model = Model(1, sources, [(0, 8, {"b": 1}), (1, 8, one)])
    assert [model.draw().source for _ in range(3)] == ["b", "a", "a"]
    assert model.phases[0] == Phase(0, 8, {"b": 1})
