"""A trace against all samples of small runs, both ways; and the verb."""

import json
import random
import warnings
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import ConfigError, DatasetConfig, build_datasets
from millrace.inspect import Trace, check_held_out
from millrace.run import InstantConfig
from millrace.run.skips import Skips
from tests.run.test_instant_runs import History, write_sources


def check_trace(dataset: Any, num: int, skips: Any = ()) -> None:
    """Compares a trace with the first samples of a dataset."""
    trace, samples = Trace(dataset), Skips(skips).samples(np.arange(num)).tolist()
    holders: dict[tuple[str, int | None], list[int]] = defaultdict(list)
    for number in range(samples[-1] + 1):
        visit = trace.sample(number)
        assert (visit.position is None) == (number not in samples)
        if visit.position is not None:
            assert samples[visit.position] == number
            mask = dataset.batch([visit.position])["loss_mask"][0]
            drawn = dataset.tokens([visit.position]).tokens
            assert np.concatenate([part.tokens for part in visit.parts]).tolist() == drawn.tolist()
            first, *trained = np.concatenate([part.trained for part in visit.parts]).tolist()
            assert not first
            assert trained + [False] * (len(mask) - len(trained)) == (mask > 0).tolist()
        for part in visit.parts:
            document = trace.store(trace.sources(part.source)[0]).document(part.document)
            assert document[part.start : part.stop].tolist() == part.tokens
            holders[part.source, part.document].append(number)
    for name in trace.names:
        documents, pairs = range(trace.store(trace.sources(name)[0]).num_documents), []
        for document in documents:
            visits = trace.visits(name, document, samples[-1] + 1)
            expected = sorted({*holders[name, document]})
            assert [visit.sample for visit in visits] == expected, (name, document)
            pairs += [(document, sample) for sample in expected]
        visits = trace.visits(name, documents, samples[-1] + 1)
        assert sorted((visit.document, visit.sample) for visit in visits) == pairs


@pytest.mark.parametrize("seed", range(20))
def test_a_trace_of_an_instant_run_is_its_samples(seed: int, tmp_path: Path) -> None:
    """Phases, lengths, caps and skips; parts of files and splits; mixed windows."""
    rng = random.Random(seed)
    history = History(rng, tmp_path)
    for _ in range(3):
        history.add_phase(max(history.model[-1][0], rng.randint(0, 100)))
    check_trace(build_datasets(history.config()).train, rng.randint(50, 300), history.skips)
    sources = {
        name: {**one, "weight": 1, "part": [0.1, 0.9]}
        for name, one in write_sources(tmp_path, {"x": 900, "y": 700}).items()
    }
    options: Any = {"sequence_length": 8, "split": "6,2,2", "mix_window": 1 + seed % 3}
    config = InstantConfig(sources=sources, seed=seed, **options)
    for dataset in build_datasets(config):
        check_trace(dataset, 120)


@pytest.mark.parametrize("seed", range(30))
def test_a_trace_of_a_built_run_is_its_samples(seed: int, tmp_path: Path) -> None:
    """Megatron-LM's order and packs: blends, splits, epochs, EOD masks, several sequences in a
    document, empty ones."""
    rng = random.Random(seed)
    sizes = {name: rng.randint(100, 300) for name in "abc"[: rng.randint(1, 3)]}
    write_sources(tmp_path, sizes)
    prefixes = [str(tmp_path / name) for name in sizes]
    packs = {"order": "millrace.order:PackPlan", "order_options": {"long_documents": "split"}}
    weights = rng.choice([None, [rng.random() + 0.1 for _ in prefixes]])
    config = DatasetConfig(
        sequence_length=rng.choice([5, 8]),
        seed=seed,
        blend=(prefixes, weights),
        split="6,2,2",
        num_samples=rng.choice([(20, 5, 5), (150, 5, 5)]),
        eod_token=rng.randrange(100),
        eod_mask_loss=rng.random() < 0.5,
        pad_token=rng.choice([None, 9]),
        add_extra_token=rng.random() < 0.7,
        **(packs if seed % 3 == 0 else {}),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dataset in build_datasets(config):
            check_trace(dataset, len(dataset))


def test_a_source_that_has_a_name_is_not_another_that_ends_with_it(tmp_path: Path) -> None:
    sources = write_sources(tmp_path, {"web": 900}, web=1)
    sources["x/web"] = sources["y/code"] = {**sources["web"], "part": [0, 0.5]}
    trace = Trace(build_datasets(InstantConfig(sources=sources, seed=1, sequence_length=8)).train)
    assert [trace.sources(name) for name in ("web", "x/web", "code")] == [[0], [1], [2]]


def test_steps_are_the_schedules(tmp_path: Path) -> None:
    """A ramp-up, skips and ranks, as a loader takes them."""
    write_sources(tmp_path, {"web": 900})
    run = tmp_path / "run.yaml"
    run.write_text(
        f"{{order: instant, seq-length: 8, global-batch-size: 8, micro-batch-size: 2, "
        f"rampup-batch-size: [4, 4, 8], num-samples: [40, 0, 0], skips: [[6, 9]], "
        f"sources: {{web: {{prefix: {tmp_path}/web, weight: 1}}}}}}"
    )
    trace = Trace.of(run)
    steps = [0, 1, 2, 3], [4, 5, 9, 10], [*range(11, 19)]
    assert tuple(map(trace.step, range(3))) == steps
    assert [trace.step(2, rank, 2) for rank in (0, 1)] == [[11, 12, 15, 16], [13, 14, 17, 18]]
    visits = [trace.sample(number) for number in (3, 7, 10, 11)]
    assert [(one.position, one.step) for one in visits] == [(3, 0), (None, None), (7, 1), (8, 2)]
    assert (trace.first_sample(2), trace.num_samples) == (11, 43)
    with pytest.raises(ConfigError, match="no step 6: give one up to 5"):
        trace.step(6)


def test_the_verb(tmp_path: Path, verb: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"id": f"d{n}", "text": "word " * (n % 5)}) for n in range(40)]
    for name in ("a", "b"):  # the same lines in both
        Path(f"{name}.jsonl").write_text("\r\r\n".join(lines), newline="")
        job = ["--input", f"{name}.jsonl", "--output-prefix", name, "--tokenizer", "bytes"]
        verb("tokenize", *job)
    sources = ", ".join(f"{name}: {{prefix: {name}_text_document, weight: 1}}" for name in "ab")
    Path("run.yaml").write_text(
        f"{{order: instant, seq-length: 16, global-batch-size: 4, num-samples: [90, 0, 0], "
        f"skips: [[2, 6]], sources: {{{sources}}}}}"
    )
    endless = f"{{order: instant, seq-length: 16, split: '5,5,0', sources: {{{sources}}}}}"
    Path("endless.yaml").write_text(endless)
    Path("lines.txt").write_text("\ufeffa.jsonl:6\nb.jsonl:8\n")
    trace = partial(verb, "trace", "run.yaml")
    [sample] = json.loads(trace("--sample", 3, "--json"))
    assert sample["position"] is None
    part = sample["parts"][-1]
    line, name = part["origin"]["line"], part["source"]
    assert "".join(text for _, text in part["texts"]) in "word word word word "
    assert f"{name}.jsonl line {line}, id d{line - 1}" in trace("--sample", 3)
    assert "\n  sample 3, skipped\n" in trace("--line", f"{tmp_path}/{name}.jsonl:{line}")
    assert "in no sample" in trace("--source", "a", "--document", 0)
    assert "and more" in trace("--source", "a", "--document", 4, "--limit", 1)
    assert trace("--held-out", "a.jsonl", "--step", 0).startswith("40 documents")
    Path("unknown.txt").write_text("a.jsonl:6\na.jsonl:41\n")
    assert "1 of 2 lines are in no source" in trace("--held-out", "unknown.txt", "--step", 0)
    for words, text in (
        (["--held-out", "lines.txt"], "2 documents of the run's files come from the list"),
        (["--held-out", "lines.txt"], "Equal text elsewhere is not found"),
        (["--line", "a.jsonl:41"], "no document of the run comes from a.jsonl:41"),
        (["--source", "c", "--document", 0], "there is no source c"),
        (["--source", "a", "--document", 40], "the document of a must be between 0 and 39, not 40"),
        (["--sample", 94], "the sample must be between 0 and 93"),
    ):
        assert text in trace(*words, status=1)
    for document in (39, 0):  # of the validation, and without a token
        found = verb("trace", "endless.yaml", "--source", "a", "--document", document)
        assert "in no sample" in found
    error = verb("trace", "endless.yaml", "--held-out", "lines.txt", status=1)
    assert "the run has no end: give the step" in error
    run = Trace.of("run.yaml")
    for one in check_held_out(run, "a.jsonl")["seen"]:
        visits = run.visits("a", one["visit"].document)
        assert one["visit"].sample == min(own.sample for own in visits if own.position is not None)
    with pytest.raises(SystemExit, match="2"):
        trace("--sample", 3, "--step", 4)
    Path("a_text_document.origins.parquet").unlink()
    assert "`millrace tokenize` writes" in trace("--held-out", "lines.txt", status=1)
