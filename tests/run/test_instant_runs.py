"""Runs in the instant order: equal to the slow model, through token files and loaders."""

import pickle
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import (
    ConfigError,
    DataError,
    GlobalBatchSampler,
    IndexedDataset,
    IndexedDatasetBuilder,
    Loader,
    ResumeError,
    TransformedDataset,
    ViewChangeWarning,
    build_datasets,
    storage,
    write_loss_ranges,
)
from millrace.run import InstantConfig, config_from, read_arguments
from millrace.run.skips import Skips
from millrace.sampling import BalancedSampler
from tests.conftest import write_documents
from tests.order.instant_model import Model
from tests.order.test_phases import cases

NAMES = ["web", "code", "wiki", "épices"]
STEP = 12  # samples of all ranks


def write_sources(folder: Path, sizes: dict[str, int], **weights: float) -> dict[str, Any]:
    """Token files whose tokens tell the source and the place: 10,000 for each source. Documents
    have up to three sequences, and some are empty."""
    rng = random.Random(len(sizes))
    for number, (name, size) in enumerate(sizes.items()):
        ends = sorted([*(rng.randrange(size) for _ in range(size // 4)), size])
        with IndexedDatasetBuilder(folder / name, np.uint16) as builder:
            start = 0
            while ends:
                bounds = [start, *(ends.pop(0) for _ in range(rng.randint(0, min(len(ends), 3))))]
                start = bounds[-1]
                tokens = np.arange(bounds[0], start) + 10_000 * number
                builder.add_document(tokens, np.diff(bounds))
    own = {name: {"weight": weight} for name, weight in weights.items()}
    return {name: {"prefix": folder / name} | own.get(name, {}) for name in sizes}


def make_run(folder: Path, sources: dict[str, Any] | None = None, **changes: Any) -> InstantConfig:
    options: dict[str, Any] = {"sequence_length": 8, "seed": 3, "phases": [], **changes}
    weights = options.pop("weights", {"web": 3, "code": 1})
    if sources is None:
        sources = write_sources(folder, {"web": 900, "code": 700}, **weights)
    return InstantConfig(**{"sources": sources, **options})


def train_of(config: InstantConfig) -> Any:
    return build_datasets(config).train


class History:
    """A random run with changes, for a configuration and for the model."""

    def __init__(self, rng: random.Random, folder: Path) -> None:
        sizes = {name: rng.randint(40, 900) for name in rng.sample(NAMES, rng.randint(1, 4))}
        self.rng, self.folder, self.sizes = rng, folder, sizes
        self.sources = write_sources(folder, sizes)
        for name in sizes:  # every third token is not trained on
            data = IndexedDataset(folder / name)
            places = np.flatnonzero(data.tokens % 10_000 % 3 == 0)
            ends = data.sequence_lengths.cumsum()
            sequences = np.searchsorted(ends, places, "right")
            offsets = places - (ends - data.sequence_lengths)[sequences]
            write_loss_ranges(folder / name, np.stack([sequences, offsets, offsets + 1], axis=1))
        for name in list(sizes)[1:]:  # the first one has no cap, and always a weight
            if rng.random() < 0.4:
                self.sources[name]["max-epochs"] = rng.randint(1, 4)
        ends = sorted(rng.sample(range(400), 4))
        self.skips = rng.choice([[], [ends[:2], ends[2:]]])
        weights = {name: rng.choice([1, 0.2, rng.random() + 1e-6]) for name in sizes}
        self.known = dict([*weights.items()][: rng.randint(1, len(sizes))])
        for name, weight in self.known.items():
            self.sources[name]["weight"] = weight
        self.length = rng.choice([4, 8, 8, 16])
        self.phases: list[dict[str, Any]] = [{}]
        self.model = [(0, self.length, dict(self.known))]
        self.options: Any = {"sequence_length": self.length, "seed": 5, "skips": self.skips}
        self.options |= {"access": rng.choice(["mmap", "file"]), "loss_ranges": "apply"}
        most = max(min(sizes.values()) // 32, 1)
        self.options["mix_window"] = rng.choice([1, rng.randint(1, most)])

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
        options = {**self.options, "phases": self.phases}
        return InstantConfig(sources=self.sources, dtype="uint16", **options)

    def make_model(self) -> Model:
        sources, mix = {}, self.options["mix_window"]
        for name, size in self.sizes.items():
            documents = IndexedDataset(self.folder / name).document_lengths.cumsum()
            sources[name] = size, self.sources[name].get("max-epochs"), mix, documents
        return Model(5, sources, self.model, self.skips)

    def expected(self, num: int) -> list[list[int]]:
        """The model's samples. A token comes once in an epoch, and an epoch is not left before its
        end where each length divides the one before."""
        model, drawn = self.make_model(), defaultdict[Any, list[int]](list)
        firsts = {name: 10_000 * number for number, name in enumerate(self.sizes)}
        samples = []
        for _ in range(num):
            one = model.draw()
            drawn[one.source, model.sources[one.source].position.epoch] += one.tokens[:-1]
            samples.append([token + firsts[one.source] for token in one.tokens])
        assert all(len({*tokens}) == len(tokens) for tokens in drawn.values())
        lengths = [length for _, length, _ in self.model]
        if all(long % short == 0 for long, short in pairwise(lengths)):
            assert not any(source.repeated for source in model.sources.values())
            for (name, epoch), tokens in drawn.items():
                if not self.skips and (name, epoch + 1) in drawn:
                    windows = [self.options["mix_window"] * length for length in lengths]
                    sizes = [(self.sizes[name] // n - 1) * n for n in windows]
                    assert len(tokens) in sizes
        return samples


def drawn(config: InstantConfig, states: Any, steps: int, ranks: int) -> tuple[list[Any], Any]:
    """The next samples of all ranks, in the global order, and the state behind them."""
    loaders = []
    for rank in range(ranks):
        share: Any = {"data_parallel_rank": rank, "data_parallel_size": ranks, "threads": ranks}
        train = pickle.loads(pickle.dumps(train_of(config)))
        loaders.append(Loader(train, micro_batch_size=STEP // ranks, **share))
        if states is not None:
            loaders[-1].load_state_dict(states)
    samples = []
    for _ in range(steps):
        for loader in loaders:
            batch = next(loader)
            samples += np.append(batch["tokens"], batch["labels"][:, -1:], axis=1).tolist()
            assert np.array_equal(batch["loss_mask"], batch["labels"] % 10_000 % 3 > 0)
    return samples, loaders[-1].state_dict()


@cases(60, 1000)
def test_a_run_with_changes_is_the_models(seed: int, tmp_path: Path) -> None:
    """Extended, re-weighted and resumed by other ranks, three times."""
    rng, samples, states = random.Random(seed), [], None
    history = History(rng, tmp_path)
    for _ in range(3):
        more, states = drawn(history.config(), states, rng.randint(1, 8), rng.choice([1, 2, 3]))
        samples += more
        last = int(Skips(history.skips).samples(np.array([len(samples)]))[0])
        history.add_phase(max(last, history.model[-1][0]))
    assert samples == history.expected(len(samples))


@pytest.mark.parametrize("mix", [1, 4])
def test_documents_are_those_of_the_sequences(mix: int, tmp_path: Path) -> None:
    """Whole-file spans are cut where documents end, mapped or not."""
    fields = ("tokens", "position_ids", "cu_seqlens", "document_numbers", "max_seqlen")
    sources, store = write_sources(tmp_path, {"a": 900}, a=1), IndexedDataset(tmp_path / "a")
    for access, boundaries in (("mmap", "documents"), ("file", "documents"), ("mmap", "eod")):
        options: Any = {"boundaries": boundaries, "access": access, "mix_window": mix}
        train = train_of(make_run(tmp_path, sources, **options))
        batch = next(Loader(train, micro_batch_size=40, fields=fields))
        tokens = batch["tokens"].ravel()
        sequences = np.searchsorted(store.sequence_lengths.cumsum(), tokens, "right")
        is_first = (np.diff(tokens, prepend=-9) != 1) | (np.diff(sequences, prepend=-9) != 0)
        is_first[::8] = True
        assert batch["cu_seqlens"].tolist() == [*np.flatnonzero(is_first).tolist(), 320]
        documents = store.documents_of(sequences[is_first]).tolist()
        assert batch["document_numbers"].tolist() == documents
        if boundaries == "documents":
            assert batch["position_ids"].max() + 1 == batch["max_seqlen"]


def test_only_what_is_drawn_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opens: Counter[str] = Counter()  # of each path; "stat PATH": it was looked at

    def count(method: str, mark: str = "") -> None:
        real = getattr(storage.LocalStorage, method)

        def counted(self: Any, path: str, *rest: Any) -> Any:
            opens[mark + path] += 1
            return real(self, path, *rest)

        monkeypatch.setattr(storage.LocalStorage, method, counted)

    count("open")
    count("stat", "stat ")
    sources = write_sources(tmp_path, dict.fromkeys(NAMES, 500), web=1, code=2)
    for options in ({}, {"split": "9,1,0"}, {"mix_window": 3}):
        opens.clear()
        phases = [{"until": 48}, {"weights": {"wiki": 1}}]
        train = train_of(make_run(tmp_path, sources, dtype="uint16", phases=phases, **options))
        assert opens == {f"stat {tmp_path / name}.bin": 1 for name in NAMES}
        train.fingerprint(0)
        for batch, names in (([0], {"code"}), (range(48), {"code", "web"})):
            tokens = train.batch(batch)["tokens"]
            assert len({*(tokens[:, 0] // 10_000).tolist()}) == len(names)
            opened = {path.partition(".")[0] for path in opens if not path.startswith("stat")}
            assert opened == {str(tmp_path / name) for name in names}


def test_splits_end_with_documents(tmp_path: Path) -> None:
    sources = write_sources(tmp_path, {"web": 900, "code": 700}, web=1, code=1)
    for source in sources.values():
        source["part"] = [0.2, 0.9]
    config = make_run(tmp_path, sources, split="8,1,1", phases=[{"until": 9}, {"seq-length": 4}])
    web: list[set[int]] = []
    for dataset in build_datasets(config):
        assert dataset is not None
        batches = [dataset.batch(np.arange(n, n + 10)) for n in range(9, 400, 10)]
        rows = [row for batch in batches for row in (batch["tokens"], batch["labels"])]
        web.append({token for row in rows for token in row.ravel().tolist() if token < 10_000})
        assert dataset[20]["tokens"].size == (4 if len(web) == 1 else 8)  # phases change training
    starts = np.cumsum(IndexedDataset(tmp_path / "web").document_lengths)
    assert {*range(180)}.isdisjoint(web[0] | web[1] | web[2])
    for before, after in pairwise(web):
        assert np.any((starts > max(before)) & (starts <= min(after)))
    two = {"web": sources["web"], "code": {"prefix": tmp_path / "none"}}  # which no phase draws
    write_documents(tmp_path / "none", [np.arange(9)] * 900)
    small = make_run(tmp_path, two, split="9,1,0", sequence_length=100)
    with pytest.raises(ConfigError, match="no source has 200 tokens in this split"):
        build_datasets(small).valid[0]  # type: ignore[index]
    write_documents(tmp_path / "one", [np.arange(900)])  # whose part of a document is nothing
    one = {"one": {"prefix": tmp_path / "one", "weight": 1, "part": [0.2, 0.9]}}
    with pytest.raises(ConfigError, match="phase 0, source one has 0 tokens; samples of 8 tokens"):
        train_of(make_run(tmp_path, one)).batch([0])


def test_a_range_is_as_large_as_its_documents(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", np.split(np.arange(5000), 5))
    source = {"prefix": tmp_path / "a", "weight": 1}
    split: Any = {"sequence_length": 32, "split": "79.9,1,19.1"}
    part: Any = {"sequence_length": 32, "phases": [{"until": 9}, {"seq-length": 500}]}
    valid = build_datasets(make_run(tmp_path, {"a": source}, **split)).valid
    source = source | {"part": [0.799, 0.809]}
    train = train_of(make_run(tmp_path, {"a": source}, **part))
    for dataset in (valid, train):  # of 50 tokens, before its ends are moved
        assert {*(dataset.batch(range(9))["tokens"] // 1000).ravel().tolist()} == {4}
    part["phases"][1]["seq-length"] = 600
    with pytest.raises(ConfigError, match=r"phase 1, source a has 1000 tokens; .* need 1200"):
        train_of(make_run(tmp_path, {"a": source}, **part))


def loader_of(config: InstantConfig, steps: int = 0) -> Loader:
    loader = Loader(train_of(config), micro_batch_size=10, prefetch=0)
    for _ in range(steps):
        next(loader)
    return loader


def test_a_changed_past_is_refused_and_a_changed_future_told(tmp_path: Path, caplog: Any) -> None:
    phases = [{"until": 50}, {"weights": {"code": 3}, "until": 210}, {"seq-length": 4}]
    same = {"phases": phases, "skips": [(20, 30)]}
    state = loader_of(make_run(tmp_path, **same), 10).state_dict()  # up to sample 110
    table: list[tuple[dict[str, Any], str | None]] = [
        ({}, None),
        ({"skips": [(20, 30), (110, 130)]}, None),
        ({"skips": [(25, 30), (20, 25)]}, None),
        ({"phases": [phases[0], {"weights": {"code": 3}}]}, None),
        ({"phases": [phases[0], phases[1] | {"until": 110}, {"weights": {"web": 0}}]}, None),
        ({"num_samples": (300, None, None), "access": "file"}, None),
        ({"seed": 4}, "seed: saved 3, now 4"),
        ({"skips": []}, r"skips: saved \[\[20, 30\]\], now \[\]"),
        ({"skips": [(20, 30), (109, 119)]}, r"(?s)now \[\[20, 30\], .*may start at 100, or later"),
        ({"weights": {"web": 1, "code": 1}}, r"phases.0 from sample 0.shares.code: saved 0.25"),
        ({"phases": [phases[0], {"weights": {"code": 4}}]}, "phases.1 from sample 50.shares.code"),
        ({"phases": [{"until": 50}, {"seq-length": 4}]}, "phases.1 from sample 50.sequence_length"),
        ({"phases": [{"until": 49}, *phases[1:]]}, "phases.1 from sample 50: saved"),
        ({"split": "9,1,0"}, r"sources.code.range\[1\]: saved 700, now 630"),
        ({"add_extra_token": False}, "add_extra_token"),
    ]
    for changes, message in table:
        loader = loader_of(make_run(tmp_path, **same | changes))
        if message is None:
            loader.load_state_dict(state)
            assert loader.consumed_samples == 100
            is_told = changes not in ({}, {"skips": [(25, 30), (20, 25)]})
            assert ("plan --diff" in caplog.text) == is_told
            caplog.clear()
            next(loader)
        else:
            with pytest.raises(ResumeError, match=message):
                loader.load_state_dict(state)


@pytest.mark.parametrize("checksums", [False, True])
def test_other_content_is_refused_once_it_was_drawn(checksums: bool, tmp_path: Path) -> None:
    def write(name: str, first: int) -> None:
        with IndexedDatasetBuilder(tmp_path / name, np.uint16, checksums=checksums) as builder:
            builder.add_documents(np.arange(first, first + 500), [300, 200])

    weights = {"web": 3.0, "code": 1.0, "wiki": 1e-9}
    sources = {name: {"prefix": tmp_path / name, "weight": one} for name, one in weights.items()}
    for name in weights:
        write(name, 0)
    config = make_run(tmp_path, sources, dtype="uint16")
    state = loader_of(config, 3).state_dict()
    assert state["fingerprint"]["sources"].keys() == {"web", "code"}
    loader = loader_of(config)
    write("wiki", 7)  # which was not drawn
    loader.load_state_dict(state)
    write("code", 7)
    with pytest.raises(ResumeError, match=r"(?s)sources.code.content: saved.*If a .info.json was"):
        loader_of(config).load_state_dict(state)


def test_rewritten_loss_ranges_are_told_once_their_source_was_drawn(tmp_path: Path) -> None:
    """As in Megatron-LM's order; of a source that was not drawn there need not be any."""
    sources = write_sources(tmp_path, dict.fromkeys(NAMES[:3], 500), web=3, code=1, wiki=1e-9)
    for name in ("web", "code"):
        write_loss_ranges(tmp_path / name, [])
    config = make_run(tmp_path, sources, dtype="uint16", loss_ranges="apply")
    loader = loader_of(config, 3)
    place = int(IndexedDataset(tmp_path / "code").sequence_lengths.argmax())
    write_loss_ranges(tmp_path / "code", [(place, 0, 1)])
    state = loader.state_dict()  # of the ranges that it has drawn with
    loader_of(config, 3).load_state_dict(loader_of(config, 3).state_dict())
    with pytest.warns(ViewChangeWarning, match=r"view.loss_ranges.code: saved '\w+', now '\w+'$"):
        loader_of(config).load_state_dict(state)


def test_a_trial_repeats_each_source_as_the_run_does(tmp_path: Path) -> None:
    sizes = {"web": 9000, "code": 5000, "wiki": 3000}
    sources = write_sources(tmp_path, sizes, web=5, code=4)
    sources["wiki"]["max-epochs"] = 3
    arguments: dict[str, Any] = {"order": "instant", "seq_length": 4, "global_batch_size": 10}
    arguments |= {"sources": sources, "num_samples": [9000, 50, 0], "split": "9,1,0"}
    arguments["skips"] = [[200, 300], [2003, 2009]]
    phases = [{"until": 3000}, {"weights": {"wiki": 6, "web": 0}, "until": 6506}]
    arguments["phases"] = [*phases, {"weights": {"web": 3}, "seq-length": 2}]
    run, trial = (config_from(arguments | more) for more in ({}, {"trial": 0.1}))
    assert isinstance(trial, InstantConfig)
    assert (trial.skips, trial.num_samples) == ([(20, 30), (200, 201)], (900, 50, 0))
    assert [phase.until for phase in trial.phases] == [301, 651, None]
    large, small = (build_datasets(config) for config in (run, trial))
    valid = [one.valid.batch([0])["tokens"].tolist() for one in (large, small)]
    assert valid[0] == valid[1]
    for share in (0.3, 0.4, 0.7, 1):
        epochs = []
        for dataset in (large.train, small.train):
            steps = np.arange(int(len(dataset) * share) // 10 * 10).reshape(-1, 10)
            drawn = [pair for step in steps for pair in dataset.sources_of(step).items()]
            epochs.append({name: one for name, (_, one) in drawn})
        assert epochs[0] == pytest.approx(epochs[1], rel=0.03, abs=0.03)
    for changes in (
        {"trial": 0},
        {"trial": 1.5},
        {"trial": "0.1"},
        {"trial": 1e-4},
        {"trial": 0.1, "split": "0,1,0"},
    ):
        with pytest.raises(ConfigError, match="trial"):
            config_from(arguments | changes)


def test_many_sources_have_a_checksum(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [np.arange(100)])
    sources = {f"s{n}": {"prefix": tmp_path / "a", "weight": 1 + n} for n in range(65)}
    state = loader_of(make_run(tmp_path, sources), 1).state_dict()
    past = state["fingerprint"]
    assert len(past["phases"]["0 from sample 0"]["shares"]) == 32
    assert 0 < len(past["sources"]) <= 10  # that were drawn
    sources["s3"]["weight"] = 9
    with pytest.raises(ResumeError, match=r"0 from sample 0.shares"):
        loader_of(make_run(tmp_path, sources)).load_state_dict(state)


def test_a_batch_has_one_length(tmp_path: Path) -> None:
    same: Any = {"phases": [{"until": 20}, {"seq-length": 4}], "skips": [(5, 11)]}
    train = train_of(make_run(tmp_path, **same))
    assert [train[n]["tokens"].size for n in (13, 14)] == [8, 4]
    with pytest.raises(ConfigError, match=r"of 8 and of 4 tokens, as a phase starts in it"):
        train.batch(np.arange(8, 16))
    Loader(train, micro_batch_size=7)
    for dataset in (train, TransformedDataset(train, [])):
        loader = Loader(dataset, micro_batch_size=2, data_parallel_size=4)
        message = r"phase 1, from sample 20, .* at 8 and at 16\. .* the 6 samples skipped"
        with pytest.raises(ConfigError, match=message):
            next(loader)
        loader.load_state_dict(loader.state_dict(16))  # the phase has begun
        assert next(loader)["tokens"].shape == (2, 4)
    sampler = GlobalBatchSampler(14, global_batch_size=4, micro_batch_size=2)
    Loader(train_of(make_run(tmp_path, **same)), sampler=sampler)
    loader = Loader(train, micro_batch_size=7)
    with pytest.raises(ConfigError, match=r"phase 1, from sample 20, has .* inside step 1;"):
        loader.load_state_dict(loader.state_dict(10))
    Loader(train, micro_batch_size=5, consumed_samples=14)  # the phase that starts there is over


def test_a_replaced_length_is_that_of_the_phases_without_one(tmp_path: Path) -> None:
    config = make_run(tmp_path, phases=[{"until": 9}, {"seq-length": 4}])
    train = train_of(replace(config, sequence_length=16))
    assert [train[n]["tokens"].size for n in (8, 9)] == [16, 4]


def test_transforms_see_the_numbers_of_the_run(tmp_path: Path) -> None:
    class Numbers:
        changes_tokens = False
        seen: Sequence[int] = ()

        def __call__(self, batch: Any, sample_numbers: Any) -> Any:
            self.seen = sample_numbers.tolist()
            return None, batch

        def fingerprint(self) -> dict[str, Any]:
            return {}

    transform, fields = Numbers(), ("sample_numbers", "dataset_numbers", "tokens", "loss_mask")
    train = train_of(make_run(tmp_path, skips=[(2, 5)]))
    for dataset in (TransformedDataset(train, [transform]), train):
        options = {"fields": fields, "token_dtype": "file", "prefetch": 0}
        batch = next(Loader(dataset, micro_batch_size=4, **options))
        assert batch["sample_numbers"].tolist() == transform.seen == [0, 1, 5, 6]
        assert batch["tokens"].dtype == np.uint16
        assert batch["dataset_numbers"].tolist() == (batch["tokens"][:, 0] < 10_000).tolist()


def test_samples_are_balanced_also_after_some_were_drawn(tmp_path: Path) -> None:
    dataset, share = train_of(make_run(tmp_path)), {"global_batch_size": 4, "micro_batch_size": 1}
    before = BalancedSampler.of(dataset, **share).sample_numbers(0).tolist()
    dataset.batch([0, 1, 2])
    assert BalancedSampler.of(dataset, **share).sample_numbers(0).tolist() == before


def test_an_empty_batch_is_of_a_source_that_takes_part(tmp_path: Path) -> None:
    write_documents(tmp_path / "short", [np.arange(9)])
    sources = {**write_sources(tmp_path, {"web": 900}, web=1), "a": tmp_path / "short"}
    assert train_of(make_run(tmp_path, sources)).batch([])["tokens"].shape == (0, 8)


def test_frozen_run(tmp_path: Path) -> None:
    train = train_of(make_run(tmp_path, phases=[{"until": 8}, {"seq-length": 4}], skips=[(2, 4)]))
    firsts = [train.batch(numbers)["tokens"][:, 0].tolist() for numbers in (range(6), [10, 10**15])]
    assert firsts == [[465, 10291, 177, 10107, 17, 161], [237, 344]]


@pytest.mark.parametrize("weights", [("3", "1"), ("", "")])
@pytest.mark.parametrize("order", ["gpt", "instant"])
def test_megatrons_arguments_run_in_either_order(order: str, weights: Any, tmp_path: Path) -> None:
    write_sources(tmp_path, {"web": 900, "code": 300})
    path, (first, second) = tmp_path / "run.yaml", weights
    path.write_text(
        f"order: {order}\ndata-path: {first} {tmp_path}/web {second} {tmp_path}/code\n"
        "split: 90,10,0\nseq-length: 8\ntrain-samples: 80\nglobal-batch-size: 8\n"
        "eval-iters: 1\neval-interval: 100\n"
    )
    train, valid, test = build_datasets(config_from(read_arguments(path)))
    assert (len(valid), test) == (8, None)
    tokens = np.concatenate([one["tokens"] for one in Loader(train, micro_batch_size=8)])[:80]
    assert tokens.shape == (80, 8)
    assert abs((tokens[:, 0] < 10_000).sum() - 60) <= 2


def test_weights_from_sizes(tmp_path: Path) -> None:
    def shares(alpha: float) -> dict[str, float]:
        past = train_of(make_run(tmp_path, sources, alpha=alpha)).fingerprint(1)
        return past["phases"]["0 from sample 0"]["shares"]  # type: ignore[no-any-return]

    sources = write_sources(tmp_path, {"web": 900, "code": 100})
    assert shares(0.5) == {"web": pytest.approx(0.75), "code": pytest.approx(0.25)}
    sources["web"]["part"] = [0, 1 / 9]
    assert shares(1)["code"] == 0.5
    write_documents(tmp_path / "empty", [])
    sources["empty"] = {"prefix": tmp_path / "empty"}
    for alpha in (0, 1):
        with pytest.raises(ConfigError, match="source empty has 0 tokens"):
            shares(alpha)


def test_a_run_stays_with_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the process goes to another folder before they are opened."""
    write_documents(tmp_path / "a", [np.arange(100)])
    monkeypatch.chdir(tmp_path)
    train = train_of(make_run(tmp_path, {"a": {"prefix": "a", "weight": 1}}, dtype="uint16"))
    monkeypatch.chdir("/")
    assert train[0]["tokens"].max() < 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": {"web": 0}}, "source web: the weight is 0: leave it out"),
        ({"weights": {"web": -1}}, "source web: weight must be between 0 and 1e\\+300, not -1"),
        ({"weights": {}}, "phase 0 has no source: give a weight to one"),
        ({"alpha": 1.0}, "source web has a weight, and there is alpha"),
        ({"phases": [{"weights": {"wep": 1}}]}, "phase 0: there is no source wep: add it"),
        ({"phases": [{"weights": {"web": "x"}}]}, "phase 0: the weight of web must be a num"),
        ({"phases": [{"weights": {"web": 0, "code": 0}}]}, "phase 0 has no source"),
        ({"phases": [{"until": 9}]}, "phase 0 of 1 has `until` 9"),
        ({"phases": [{}, {}]}, "phase 0 of 2 has `until` None"),
        ({"phases": [{"until": 9}, {"until": 9}, {}]}, "phase 1 starts at sample 9"),
        ({"phases": [{"till": 9}, {}]}, "phase 0: .* argument 'till'; there are until"),
        ({"phases": [{"seq-length": 4, "sequence_length": 4}]}, "gives sequence_length twice"),
        ({"phases": [3]}, "phase 0 is 3; give some of until"),
        ({"phases": [{"until": 9}, {"seq-length": 999}]}, "phase 1, source code has 700 tokens"),
        ({"skips": [(5, 5)]}, r"skips\[0\] is \(5, 5\); give \[start, stop\]"),
        ({"skips": [(0, 2**62)]}, r"0 <= start < stop < 2\*\*62"),
        ({"skips": [(5, 9), (2, 6)]}, r"skips \(2, 6\) and \(5, 9\) overlap"),
        ({"mix_window": 0}, "mix_window must be between 1 and"),
        ({"mix_window": 99}, "code has 700 tokens; samples of 8 tokens, 99 in a window, need 1584"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"sources": {}}, "sources must be one or more"),
        ({"sources": {"web": {"weight": 1}}}, "source web: .*missing .* 'prefix'"),
        ({"sources": {"web": {"prefix": "a", "part": [1, 0]}}}, "source web: a part must be"),
        ({"sources": {"web": {"prefix": "a", "max_epochs": 0}}}, "source web: max_epochs must be"),
        ({"sources": {"web": {"prefix": "a", "dtype": "uint7"}}}, "source web: dtype is 'uint7'"),
        ({"sources": {"web": {"prefix": "no", "weight": 1}}}, "source web: /.*/no.bin not found"),
        (
            {"dtype": "int32"},
            "source web: .* has 900 tokens, uint16; the run takes it for 450, int32",
        ),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        train_of(make_run(tmp_path, **changes))[0]


def test_arguments_of_another_order_are_refused() -> None:
    rest = {"seq_length": 8, "train_samples": 5, "data_path": ["a"], "eval_iters": 0}
    for own in ({"sources": {"a": "a"}}, {"alpha": 0.5}, {"mix_window": 4}):
        with pytest.raises(ConfigError, match=f"{next(iter(own))} needs `order: instant`"):
            config_from({**rest, **own})
    with pytest.raises(ConfigError, match="full_validation needs `order: gpt`"):
        config_from({**rest, "order": "instant", "full_validation": True})
    with pytest.raises(ConfigError, match="there are sources and data_path"):
        config_from({**rest, "order": "instant", "sources": {"a": "a"}})
    with pytest.raises(ConfigError, match="two prefixes end with a: give sources"):
        config_from({**rest, "order": "instant", "data_path": ["x/a", "y/a"]})
    named = config_from({**rest, "order": "instant", "data_path": "3 x/a 1 b"})
    assert isinstance(named, InstantConfig)
    assert named.split == "969, 30, 1"
    sources = [(name, one.prefix, one.weight) for name, one in named.sources.items()]
    assert sources == [("a", "x/a", 3), ("b", "b", 1)]
    sized = config_from({**rest, "order": "instant", "alpha": 0.5})
    assert isinstance(sized, InstantConfig)
    assert sized.alpha == 0.5
    assert config_from({**rest, "order": "gpt"}) == config_from(rest)
