"""Runs in the instant order: equal to the slow model, through token files and loaders."""

import pickle
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import (
    ConfigError,
    DataError,
    GlobalBatchSampler,
    IndexedDataset,
    Loader,
    LossRanges,
    ResumeError,
    TransformedDataset,
    build_datasets,
    storage,
    write_loss_ranges,
)
from millrace.cli import main
from millrace.run import InstantConfig, config_from, read_arguments
from millrace.run.skips import Skips
from tests.conftest import write_documents
from tests.order.instant_model import Model

NAMES = ["web", "code", "wiki", "épices"]
STEP = 12  # samples of all ranks


def write_sources(rng: random.Random, folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    """Token files whose tokens tell the source and the place: 10,000 for each source."""
    for number, (name, size) in enumerate(sizes.items()):
        cuts = sorted({rng.randrange(1, size) for _ in range(size // 9)})
        tokens = np.arange(size) + 10_000 * number
        write_documents(folder / name, np.split(tokens, cuts))
    return {name: {"prefix": folder / name} for name in sizes}


def make_run(folder: Path, sources: dict[str, Any] | None = None, **changes: Any) -> InstantConfig:
    options: dict[str, Any] = {"sequence_length": 8, "seed": 3, "phases": [], **changes}
    if sources is None:
        sources = write_sources(random.Random(1), folder, {"web": 900, "code": 700})
        for name, weight in changes.pop("weights", {"web": 3, "code": 1}).items():
            sources[name]["weight"] = weight
        options.pop("weights", None)
    return InstantConfig(sources=sources, **options)


def train_of(config: InstantConfig) -> Any:
    return build_datasets(config).train


class History:
    """A random run with changes, for a configuration and for the model."""

    def __init__(self, rng: random.Random, folder: Path) -> None:
        sizes = {name: rng.randint(40, 900) for name in rng.sample(NAMES, rng.randint(1, 4))}
        self.rng, self.sizes, self.sources = rng, sizes, write_sources(rng, folder, sizes)
        for name in list(sizes)[1:]:  # the first one has no cap, and always a weight
            if rng.random() < 0.4:
                self.sources[name]["max-epochs"] = rng.randint(1, 4)
        ends = sorted(rng.sample(range(400), 4))
        self.skips = rng.choice([[], [ends[:2], ends[2:]]])
        self.weights = {name: rng.choice([1, 0.2, rng.random() + 1e-6]) for name in sizes}
        first = list(self.weights)[: rng.randint(1, len(sizes))]
        for name in first:
            self.sources[name]["weight"] = self.weights[name]
        self.known = {name: self.weights[name] for name in first}
        self.length = rng.choice([4, 8, 8, 16])
        self.phases: list[dict[str, Any]] = [{}]
        self.model = [(0, self.length, dict(self.known))]
        self.first_length = self.length

    def add_phase(self, least: int) -> None:
        """A phase from a sample at `least` or later, at a multiple of a step."""
        rng = self.rng
        position = Skips(self.skips).position(least) + rng.randint(1, 80)
        position = -(-position // STEP) * STEP
        start = int(Skips(self.skips).samples(np.array([position]))[0])
        self.phases[-1]["until"] = start
        name, first = rng.choice(list(self.sizes)), next(iter(self.sizes))
        weight = rng.choice([0, 1, 3]) if name != first else 2
        self.known = {n: w for n, w in (self.known | {name: weight}).items() if w > 0}
        change: dict[str, Any] = {"weights": {name: weight}}
        if rng.random() < 0.5:
            self.length = rng.choice([2, 3, 4, 8, 16])
            change["seq-length"] = self.length
        self.phases.append(change)
        self.model.append((start, self.length, dict(self.known)))

    def config(self) -> InstantConfig:
        places = {"skips": self.skips, "global_batch_size": STEP, "dtype": "uint16"}
        own = {"sequence_length": self.first_length, "seed": 5, "phases": self.phases, **places}
        return InstantConfig(sources=self.sources, **own)

    def make_model(self) -> Model:
        sizes = {
            name: (size, cap) if (cap := self.sources[name].get("max-epochs")) else size
            for name, size in self.sizes.items()
        }
        return Model(5, sizes, self.model, tuple(map(tuple, self.skips)))  # type: ignore[arg-type]

    def expected(self, num: int) -> list[list[int]]:
        model = self.make_model()
        samples = (model.draw() for _ in range(num))
        firsts = {name: 10_000 * number for number, name in enumerate(self.sizes)}
        return [
            list(range(s.start + firsts[s.source], s.start + firsts[s.source] + s.length + 1))
            for s in samples
        ]


def drawn(config: InstantConfig, states: Any, steps: int, ranks: int) -> tuple[list[Any], Any]:
    """The next samples of all ranks, in the global order, and the state behind them."""
    loaders = []
    for rank in range(ranks):
        share = {"data_parallel_rank": rank, "data_parallel_size": ranks}
        loaders.append(
            Loader(train_of(config), micro_batch_size=STEP // ranks, prefetch=0, **share)
        )
        if states is not None:
            loaders[-1].load_state_dict(states)
    samples = []
    for _ in range(steps):
        for loader in loaders:
            batch = next(loader)
            rows = np.append(batch["tokens"], batch["labels"][:, -1:], axis=1)
            samples += rows.tolist()
    return samples, loaders[-1].state_dict()


@pytest.mark.parametrize("seed", range(60))
def test_a_run_with_changes_is_the_models(seed: int, tmp_path: Path) -> None:
    """Extended, re-weighted and resumed by other ranks, three times."""
    rng, samples, states = random.Random(seed), [], None
    history = History(rng, tmp_path)
    for _ in range(3):
        steps = rng.randint(1, 8)
        more, states = drawn(history.config(), states, steps, rng.choice([1, 2, 3]))
        samples += more
        last = int(Skips(history.skips).samples(np.array([len(samples)]))[0])
        history.add_phase(max(last, history.model[-1][0]))
    assert samples == history.expected(len(samples))


def test_documents_are_those_of_the_sequences(tmp_path: Path) -> None:
    """Whole-file spans are cut where documents end, mapped or not."""
    fields = ("tokens", "position_ids", "cu_seqlens", "document_numbers", "max_seqlen")
    for access, boundaries in (("mmap", "documents"), ("file", "documents"), ("mmap", "eod")):
        train = train_of(make_run(tmp_path, boundaries=boundaries, access=access))
        batch = next(Loader(train, micro_batch_size=40, fields=fields))
        tokens = batch["tokens"].ravel()
        numbers = np.empty_like(tokens)
        for place, name in enumerate(("web", "code")):
            here = tokens // 10_000 == place
            ends = np.cumsum(IndexedDataset(tmp_path / name).document_lengths)
            numbers[here] = np.searchsorted(ends, tokens[here] % 10_000, "right")
        is_first = (np.diff(tokens, prepend=-9) != 1) | (np.diff(numbers, prepend=-9) != 0)
        is_first[::8] = True
        assert batch["cu_seqlens"].tolist() == [*np.flatnonzero(is_first).tolist(), 320]
        assert batch["document_numbers"].tolist() == numbers[is_first].tolist()
        if boundaries == "documents":
            assert batch["position_ids"].max() + 1 == batch["max_seqlen"]
        assert train.spans([0, 1, 2]).sequences.min() >= 0


def test_ranges_without_loss(tmp_path: Path) -> None:
    sources = write_sources(random.Random(1), tmp_path, {"web": 900, "code": 700})
    for name, source in sources.items():
        source["weight"] = 1
        lengths = IndexedDataset(tmp_path / name).sequence_lengths
        write_loss_ranges(tmp_path / name, [(n, 0, 2) for n in np.flatnonzero(lengths > 2)])
    train = train_of(make_run(tmp_path, sources, loss_ranges="apply"))
    plain = train_of(make_run(tmp_path, sources, loss_ranges="ignore"))
    by_hand = TransformedDataset(plain, [LossRanges(plain)])
    numbers = np.arange(100)
    one, other = train.batch(numbers), by_hand.batch(numbers)
    assert 0 < one["loss_mask"].mean() < 0.9
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name])


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each path is opened, or looked at ("stat PATH")."""
    counts: Counter[str] = Counter()
    real_open, real_stat = storage.LocalStorage.open, storage.LocalStorage.stat

    def counted_open(self: Any, path: str, access: Any) -> Any:
        counts[path] += 1
        return real_open(self, path, access)

    def counted_stat(self: Any, path: str) -> Any:
        counts[f"stat {path}"] += 1
        return real_stat(self, path)

    monkeypatch.setattr(storage.LocalStorage, "open", counted_open)
    monkeypatch.setattr(storage.LocalStorage, "stat", counted_stat)
    return counts


def test_only_what_is_drawn_is_opened(tmp_path: Path, opens: Counter[str]) -> None:
    sources = write_sources(random.Random(1), tmp_path, dict.fromkeys(NAMES, 500))
    for name, source in sources.items():
        source["weight"] = {"web": 1, "code": 2}.get(name)
    for split in (None, "9,1,0"):
        opens.clear()
        phases = [{"until": 48}, {"weights": {"wiki": 1}}]
        config = make_run(tmp_path, sources, split=split, dtype="uint16", phases=phases)
        train = train_of(config)
        assert opens == {f"stat {tmp_path / name}.bin": 1 for name in NAMES}
        train.fingerprint(0)
        for batch, names in (([0], {"code"}), (range(48), {"code", "web"})):
            tokens = train.batch(batch)["tokens"]
            assert len({*(tokens[:, 0] // 10_000).tolist()}) == len(names)
            opened = {path.partition(".")[0] for path in opens if not path.startswith("stat")}
            assert opened == {str(tmp_path / name) for name in names}


def test_splits_end_with_documents(tmp_path: Path) -> None:
    part = {"part": [0.2, 0.9], "weight": 1}
    sources = write_sources(random.Random(1), tmp_path, {"web": 900, "code": 700})
    for source in sources.values():
        source |= part
    config = make_run(tmp_path, sources, split="8,1,1", phases=[{"until": 9}, {"seq-length": 4}])
    seen = []
    for dataset in build_datasets(config):
        assert dataset is not None
        own = {*range(0)}
        for first in range(9, 400, 10):
            batch = dataset.batch(np.arange(first, first + 10))
            own |= {*batch["tokens"].ravel().tolist(), *batch["labels"].ravel().tolist()}
        seen.append(own)
        if len(seen) > 1:
            assert dataset[20]["tokens"].size == 8  # phases do not change validation
    assert not seen[0] & seen[1]
    assert not seen[1] & seen[2]
    starts = np.cumsum(IndexedDataset(tmp_path / "web").document_lengths)
    web = [{token for token in own if token < 10_000} for own in seen]
    assert {*range(180)}.isdisjoint(web[0] | web[1] | web[2])
    for before, after in ((web[0], web[1]), (web[1], web[2])):
        assert np.any((starts > max(before)) & (starts <= min(after)))
    small = make_run(tmp_path, {"web": sources["web"] | {"part": [0, 0.01]}}, split="0,1,0")
    with pytest.raises(ConfigError, match="no source has 16 tokens in this split"):
        build_datasets(small).valid[0]  # type: ignore[index]


def saved(config: InstantConfig, steps: int) -> Any:
    loader = Loader(train_of(config), micro_batch_size=10, prefetch=0)
    for _ in range(steps):
        next(loader)
    return loader.state_dict()


def test_a_changed_past_is_refused_and_a_changed_future_is_not(tmp_path: Path) -> None:
    make = lambda **changes: make_run(tmp_path, **changes)  # noqa: E731
    phases = [{"until": 50}, {"weights": {"code": 3}, "until": 210}, {"seq-length": 4}]
    state = saved(make(phases=phases, skips=[(20, 30)]), 10)  # up to sample 110
    same = {"phases": phases, "skips": [(20, 30)]}
    futures: list[dict[str, Any]] = [
        {},
        {"skips": [(20, 30), (110, 130)]},
        {"phases": [phases[0], {"weights": {"code": 3}}]},
        {"phases": [phases[0], phases[1] | {"until": 110}, {"weights": {"web": 0}}]},
        {"num_samples": (300, None, None), "access": "file"},
    ]
    for changes in futures:
        loader = Loader(train_of(make(**same | changes)), micro_batch_size=10, prefetch=0)
        loader.load_state_dict(state)
        assert loader.consumed_samples == 100
        next(loader)
    pasts: list[tuple[dict[str, Any], str]] = [
        ({"seed": 4}, "seed: saved 3, now 4"),
        ({"skips": []}, "skips: saved 1 entries, now 0"),
        ({"skips": [(20, 30), (109, 119)]}, "skips: saved 1 entries, now 2"),
        ({"weights": {"web": 1, "code": 1}}, r"phases.0 from sample 0.shares.code: saved 0.25"),
        ({"phases": [phases[0], {"weights": {"code": 4}}]}, "phases.1 from sample 50.shares.code"),
        ({"phases": [{"until": 50}, {"seq-length": 4}]}, "phases.1 from sample 50.sequence_length"),
        ({"phases": [{"until": 49}, *phases[1:]]}, "phases.1 from sample 50: saved"),
        ({"split": "9,1,0"}, r"sources.code\[3\]: saved 700, now 630"),
        ({"add_extra_token": False}, "add_extra_token"),
    ]
    for changes, message in pasts:
        loader = Loader(train_of(make(**same | changes)), micro_batch_size=10, prefetch=0)
        with pytest.raises(ResumeError, match=message):
            loader.load_state_dict(state)


def test_many_sources_have_a_checksum(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [np.arange(100)])
    sources = {f"s{n}": {"prefix": tmp_path / "a", "weight": 1 + n} for n in range(65)}
    state = saved(make_run(tmp_path, sources), 1)
    past = state["fingerprint"]
    assert len(past["phases"]["0 from sample 0"]["shares"]) == 32
    assert 0 < len(past["sources"]) <= 10  # that were drawn
    sources["s3"]["weight"] = 9
    loader = Loader(train_of(make_run(tmp_path, sources)), micro_batch_size=10)
    with pytest.raises(ResumeError, match=r"0 from sample 0.shares"):
        loader.load_state_dict(state)


def test_a_batch_has_one_length(tmp_path: Path) -> None:
    phases = [{"until": 20}, {"seq-length": 4}]
    train = train_of(make_run(tmp_path, phases=phases, skips=[(5, 11)]))
    assert train[13]["tokens"].size == 8
    assert train[14]["tokens"].size == 4
    with pytest.raises(ConfigError, match=r"a phase starts at 20"):
        train.batch(np.arange(8, 16))
    Loader(train, micro_batch_size=7)
    for dataset in (train, TransformedDataset(train, [])):
        with pytest.raises(ConfigError, match=r"phase 1, from sample 20, .* at 8 and at 16"):
            Loader(dataset, micro_batch_size=4, data_parallel_size=2)
    sampler = GlobalBatchSampler(14, global_batch_size=4, micro_batch_size=2)
    Loader(train_of(make_run(tmp_path, phases=phases, skips=[(5, 11)])), sampler=sampler)
    with pytest.raises(ConfigError, match=r"phase 1, from sample 20, .* at 12 and at 16"):
        make_run(tmp_path, phases=phases, skips=[(5, 11)], global_batch_size=4)


def test_transforms_see_the_numbers_of_the_run(tmp_path: Path) -> None:
    class Numbers:
        changes_tokens = False
        seen: Sequence[int] = ()

        def __call__(self, batch: Any, sample_numbers: Any) -> Any:
            self.seen = sample_numbers.tolist()
            return None, batch

        def fingerprint(self) -> dict[str, Any]:
            return {}

    transform = Numbers()
    train = train_of(make_run(tmp_path, skips=[(2, 5)]))
    loader = Loader(
        TransformedDataset(train, [transform]),
        micro_batch_size=4,
        fields=("sample_numbers", "loss_mask"),
        prefetch=0,
    )
    assert next(loader)["sample_numbers"].tolist() == transform.seen == [0, 1, 5, 6]
    fields = ("sample_numbers", "dataset_numbers", "tokens")
    batch = next(Loader(train, micro_batch_size=4, fields=fields, token_dtype="file"))
    assert batch["sample_numbers"].tolist() == [0, 1, 5, 6]
    assert batch["tokens"].dtype == np.uint16
    assert batch["dataset_numbers"].tolist() == (batch["tokens"][:, 0] < 10_000).tolist()


def test_copies_draw_the_same(tmp_path: Path) -> None:
    train = train_of(make_run(tmp_path, phases=[{"until": 20}, {"seq-length": 4}]))
    before = train.batch(np.arange(30, 60))
    copy = pickle.loads(pickle.dumps(train))
    np.testing.assert_array_equal(copy.batch(np.arange(30, 60))["tokens"], before["tokens"])
    with Loader(train, micro_batch_size=5, consumed_samples=30, threads=3) as loader:
        rows = np.concatenate([next(loader)["tokens"] for _ in range(6)])
    np.testing.assert_array_equal(rows, before["tokens"])
    train.mixture.after_fork()
    np.testing.assert_array_equal(train.batch(np.arange(30, 60))["tokens"], before["tokens"])


def test_raw_tokens(tmp_path: Path) -> None:
    sources = write_sources(random.Random(1), tmp_path, {"web": 900, "code": 700})
    sources = {name: one | {"weight": 1} for name, one in sources.items()}
    paired = train_of(make_run(tmp_path, sources, dtype="uint16", split="8,2,0"))
    sources["code"] = {"prefix": tmp_path / "code.bin", "raw": True, "weight": 1}
    for access in ("mmap", "file"):
        raw = train_of(make_run(tmp_path, sources, dtype="uint16", access=access))
        one, other = (
            raw.batch(range(50)),
            train_of(
                make_run(tmp_path, sources | {"code": {"prefix": tmp_path / "code", "weight": 1}})
            ).batch(range(50)),
        )
        np.testing.assert_array_equal(one["tokens"], other["tokens"])
        with pytest.raises(ConfigError, match="has no index"):
            next(Loader(raw, micro_batch_size=8, fields=("document_numbers",)))
    assert len(paired) > 2**62
    with pytest.raises(ConfigError, match="source code has raw tokens: give their dtype"):
        train_of(make_run(tmp_path, sources))


def test_frozen_run(tmp_path: Path) -> None:
    train = train_of(make_run(tmp_path, phases=[{"until": 8}, {"seq-length": 4}], skips=[(2, 4)]))
    assert train.batch(range(6))["tokens"][:, 0].tolist() == FROZEN
    assert train.batch([10, 10**15])["tokens"][:, 0].tolist() == FROZEN_LATER


FROZEN = [465, 10291, 177, 10107, 17, 161]
FROZEN_LATER = [237, 344]


def test_run_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sources(random.Random(1), tmp_path, {"web": 900, "code": 700})
    (tmp_path / "run.yaml").write_text(
        f"""
order: instant
seq-length: 8
dtype: uint16
split: "9,1,0"
global-batch-size: 4
train-iters: 50
eval-iters: 0
sources:
  web: {{prefix: {tmp_path}/web, weight: 80}}
  code: {{prefix: {tmp_path}/code, weight: 20, max-epochs: 4, part: [0, 0.6]}}
phases:
  - {{until: 1_000}}
  - {{weights: {{web: 50}}, until: 2_000}}
  - {{seq-length: 4}}
skips: [[100, 104]]
"""
    )
    (tmp_path / "run.toml").write_text(
        f"""
order = "instant"
seq-length = 8
dtype = "uint16"
split = "9,1,0"
global-batch-size = 4
train-iters = 50
eval-iters = 0
skips = [[100, 104]]
phases = [{{until = 1_000}}, {{weights = {{web = 50}}, until = 2_000}}, {{seq-length = 4}}]
sources.web = {{prefix = "{tmp_path}/web", weight = 80}}
sources.code = {{prefix = "{tmp_path}/code", weight = 20, max-epochs = 4, part = [0, 0.6]}}
"""
    )
    configs = [config_from(read_arguments(tmp_path / name)) for name in ("run.yaml", "run.toml")]
    assert configs[0] == configs[1]
    datasets = build_datasets(configs[0])
    assert (len(datasets.train or ""), len(datasets.valid or "")) == (200, 0)
    assert datasets.test is None
    assert configs[0].seed == 1234
    options = ["--seconds", "0.01", "--step-time", "0.001", "--keep-cache"]
    assert main(["bench", str(tmp_path / "run.yaml"), *options]) == 0
    assert "200 samples of 8 tokens, 2 bytes a token" in capsys.readouterr().out
    assert main(["index", str(tmp_path / "run.yaml"), "--cache", str(tmp_path)]) == 1
    assert "the order is instant, for which nothing is built" in capsys.readouterr().err


def test_weights_from_sizes(tmp_path: Path) -> None:
    sources = write_sources(random.Random(1), tmp_path, {"web": 900, "code": 100})
    train = train_of(make_run(tmp_path, sources, alpha=0.5))
    past = train.fingerprint(1)["phases"]["0 from sample 0"]["shares"]
    assert past == {"web": pytest.approx(0.75), "code": pytest.approx(0.25)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": {"web": 0}}, "source web: the weight is 0: leave it out"),
        ({"weights": {"web": -1}}, "source web: the weight is -1; it must be positive"),
        ({"weights": {"web": float("nan")}}, "source web: the weight is nan"),
        ({"weights": {}}, "phase 0 has no source: give a weight to one"),
        ({"alpha": 1.0}, "source web has a weight, and there is alpha"),
        ({"phases": [{"weights": {"wep": 1}}]}, "phase 0: there is no source wep: add it"),
        ({"phases": [{"weights": {"web": "x"}}]}, "phase 0: the weight of web must be a num"),
        ({"phases": [{"weights": {"web": 0, "code": 0}}]}, "phase 0 has no source"),
        ({"phases": [{"until": 9}]}, "the last phase has `until` 9"),
        ({"phases": [{}, {}]}, "phase 0 has no `until`"),
        ({"phases": [{"until": 9}, {"until": 9}, {}]}, "phase 1 starts at sample 9"),
        ({"phases": [{"till": 9}, {}]}, "phase 0: .* argument 'till'; there are until"),
        ({"phases": [3]}, "phase 0 is 3; give some of until"),
        ({"phases": [{"until": 9}, {"seq-length": 0}]}, "phase 1: sequence_length must be"),
        ({"phases": [{"until": 9}, {"seq-length": 999}]}, "phase 1, source code has 700 tokens"),
        ({"skips": [(5, 5)]}, r"skips\[0\] is \(5, 5\); give \[start, stop\]"),
        ({"skips": [(5, 9), (2, 6)]}, r"skips \(2, 6\) and \(5, 9\) overlap"),
        ({"split": "x"}, "must be one to three shares"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"num_samples": (1, 2)}, "num_samples must have three entries"),
        ({"sources": {}}, "sources must be one or more"),
        ({"sources": {"web": {"weight": 1}}}, "source web: .*missing .* 'prefix'"),
        ({"sources": {"web": {"prefix": "a", "part": [1, 0]}}}, "source web: the part must be"),
        ({"sources": {"web": {"prefix": "a", "max_epochs": 0}}}, "source web: max_epochs must be"),
        ({"sources": {"web": {"prefix": "a", "dtype": "uint7"}}}, "source web: dtype is 'uint7'"),
        ({"sources": {"web": {"prefix": "no", "weight": 1}}}, "source web: no.bin not found"),
        (
            {"dtype": "int32"},
            "source web: .* has 900 tokens, uint16; the run began with 450, int32",
        ),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        train_of(make_run(tmp_path, **changes))[0]


def test_arguments_of_another_order_are_refused() -> None:
    rest = {"seq_length": 8, "train_samples": 5, "data_path": ["a"], "eval_iters": 0}
    with pytest.raises(ConfigError, match="sources belong to the instant order"):
        config_from({**rest, "sources": {"a": "a"}})
    with pytest.raises(ConfigError, match="there are sources and data_path"):
        config_from({**rest, "order": "instant", "sources": {"a": "a"}})
    with pytest.raises(ConfigError, match="two prefixes end with a: give sources"):
        config_from({**rest, "order": "instant", "data_path": ["x/a", "y/a"]})
    named = config_from({**rest, "order": "instant", "data_path": "3 x/a 1 b"})
    assert isinstance(named, InstantConfig)
    assert named.split == "969, 30, 1"
    assert {name: (one.prefix, one.weight) for name, one in named.sources.items()} == {
        "a": ("x/a", 3),
        "b": ("b", 1),
    }
    assert config_from({**rest, "order": "gpt"}) == config_from(rest)
