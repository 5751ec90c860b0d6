"""`millrace plan`: what a run will draw is what the slow model draws."""

import json
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace import build_datasets
from millrace.checks import MAX_INT64
from millrace.inspect import Trace, forecast
from millrace.order.instant import num_windows
from millrace.run import InstantConfig
from tests.conftest import write_documents
from tests.run.test_instant_runs import History, write_sources

RUN = """
order: instant
seq-length: 8
dtype: uint16
global-batch-size: 4
save-interval: 10
train-samples: {samples}
eval-iters: 0
split: "1,0,0"
sources:
  web: {{prefix: {folder}/web, weight: 80}}
  code: {{prefix: {folder}/code, weight: {weight}, max-epochs: 2}}
phases:
  - {{until: 100}}
  - {{weights: {{code: {code}}}, until: {until}}}
  - {{seq-length: {length}}}
skips: [[{skip}, 44]]
{more}
"""


def write_run(own: Path, name: str = "run.yaml", **changes: Any) -> str:
    values = {"samples": 300, "weight": 20, "code": 30, "until": 120, "length": 5}
    values |= {"skip": 40, "more": "", "folder": own, **changes}
    (own / name).write_text(RUN.format(**values))
    return str(own / name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sources(tmp_path, {"web": 900, "code": 200})
    return tmp_path


@pytest.mark.parametrize("seed", range(40))
def test_it_counts_what_the_model_draws(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    history = History(rng, tmp_path)
    for _ in range(rng.randint(0, 4)):
        history.add_phase(history.model[-1][0])
    num_samples = history.model[-1][0] + rng.randint(1, 200)
    one = forecast(replace(history.config(), num_samples=(num_samples, None, None)), num_parts=9)
    model = history.make_model()
    drawn: Counter[tuple[int, str]] = Counter()
    for _ in range(num_samples):
        sample = model.draw()
        phase = sum(start <= sample.number for start, *_ in history.model) - 1
        drawn[phase, sample.source] += 1
    assert one.starts[-1] == sample.number + 1
    assert one.windows.sum() == one.starts[-1]
    for place, name in enumerate(one.sources):
        counts = [drawn[number, name] for number in range(len(one.samples))]
        assert one.samples[:, place].tolist() == counts
        source = model.sources[name]
        assert one.repeats[:, place].sum() <= source.repeated  # which may not be drawn again yet
        if (position := source.position) is not None:
            size = (history.sizes[name] // position.window - 1) * position.window
            assert one.epochs[-1, place] == pytest.approx(position.epoch + position.past / size)
            assert one.unseen[-1, place] == history.sizes[name] - size < 2 * position.window


@pytest.mark.parametrize(
    ("mix_window", "num_samples"), [(1, 4500), (1, 5400), (1, 9000), (3, 5400), (2, 5000)]
)
def test_repeats_are_about_those_that_are_drawn(
    mix_window: int, num_samples: int, tmp_path: Path
) -> None:
    phases = [{"until": 4000}, {"until": 4800, "seq-length": 16}, {}]
    options: Any = {"sequence_length": 8, "seed": 2, "phases": phases, "mix_window": mix_window}
    sources = write_sources(tmp_path, {"web": 50_000}, web=1)
    config = InstantConfig(sources=sources, num_samples=(num_samples, 0, 0), **options)
    train, size = build_datasets(config).train, num_windows(50_000, 16 * mix_window) * mix_window
    before = train.batch(range(4000))["tokens"]
    stops = [4000, *(min(stop, num_samples, 4000 + size) for stop in (4800, MAX_INT64))]
    repeats = [
        len(numbers) and np.isin(train.batch(numbers)["tokens"], before).sum()
        for numbers in map(range, stops, stops[1:])
    ]
    one = forecast(config)
    assert one.repeats[1:, 0].tolist() == pytest.approx(repeats[: len(one.repeats) - 1], rel=0.1)
    is_told = any("`mix-window: 2` avoids it" in text for text in one.warnings)
    assert is_told == (mix_window != 2)


def test_the_report(folder: Path, verb: Any) -> None:
    run = write_run(folder, more="alfa: 1")
    text = verb("plan", run, "--picture", folder / "run.html")
    for line in (
        "phase 0: samples 0 to 100, 8 tokens each, steps 0 to 24, 4 are skipped",
        "phase 1: samples 100 to 120, 8 tokens each, steps 24 to 29",
        "phase 2: samples 120 to 304, 5 tokens each, steps 29 to 75",
        "warning: phase 1 has 5 steps, fewer than the 10 from a checkpoint",
        "source web: about 756 tokens are drawn again, as a sequence length that does not divide",
        "code reaches max_epochs at sample 120",
        "arguments that do not concern the data were left out: alfa",
    ):
        assert line in text
    with pytest.raises(SystemExit, match="2"):
        verb("plan", run, "--picture", folder / "run.png")
    page = (folder / "run.html").read_text()
    assert page.count("<title>") == 64
    assert "web 80" in page
    short = write_run(folder, "short.yaml", samples=9)
    text = verb("plan", short, "--picture", folder / "short.svg")
    assert "warning: phase 1 starts at sample 100, behind the end of the run: it" in text
    assert (folder / "short.svg").read_text().count("<title>") == 9
    one = json.loads(verb("plan", run, "--json"))
    assert np.sum(one["samples"]) == 300
    assert one["caps"] == [["code", 120]]
    options = ["--seconds", "0.01", "--step-time", "0.001", "--keep-cache"]
    text = verb("bench", run, *options)
    assert "116 samples of 8 tokens, of 300 in all\n" in text
    assert "were left out: alfa" in text
    refusal = verb("index", run, "--cache", folder, status=1)
    assert "the order is instant, for which nothing is built" in refusal


def test_it_knows_the_built_order(folder: Path, verb: Any) -> None:
    path, new = folder / "gpt.yaml", folder / "new.yaml"
    rest = "split: 1,0,0\nseq-length: 8\ntrain-samples: 1000\neval-iters: 0\nseed: 1\n"
    path.write_text(f"data-path: [3, {folder}/web, 1, {folder}/web]\n{rest}")
    text = verb("plan", path)
    for line in ("  750   6,000    6.67", "warning: more than 4 epochs of", "has the data of"):
        assert line in text
    [limit] = re.findall("with more than about ([0-9,]+) samples", text)
    most = int(limit.replace(",", ""))
    write_documents(folder / "other", np.split(np.arange(900) + 7, [50]))  # of the same lengths
    new.write_text(path.read_text().replace("3, ", "").replace(" 1, ", " "))
    text = verb("plan", new)
    assert "warning: the run ends after 224 samples, although 1,000 are asked for" in text
    assert "with more than about" not in text
    for changed, to, change in (
        ("1000", f"{most * 0.99:.0f}", "no sample changes"),
        ("1000", f"{most * 1.02:.0f}", "position 0 is the first one"),
        ("/web", "/other", "content"),
        ("seed: 1", "seed: 1\nboundaries: documents", "view.boundaries: nothing, now 'documents'"),
        ("seed: 1", "seed: 1\nloss_ranges: apply", "view.loss_ranges: False, now True"),
    ):
        new.write_text(path.read_text().replace(changed, to))
        assert change in verb("plan", new, "--diff", path)


def test_one_prefix_gives_whole_epochs_of_which_the_run_takes_a_part(
    folder: Path, verb: Any
) -> None:
    run = folder / "one.yaml"
    run.write_text(
        f"{{data-path: [{folder}/web], split: '1,0,0', seq-length: 8, num-samples: [20, 0, 0]}}"
    )
    assert "samples 0 to 20, 8 tokens" in verb("plan", run)
    assert Trace.of(run).num_samples == 20


def test_copies_are_told_once_each_up_to_a_number(tmp_path: Path) -> None:
    [web] = write_sources(tmp_path, {"web": 900}, web=1).values()
    sources = {f"s{number:02}": web for number in range(30)}
    config = InstantConfig(sources=sources, seed=1, sequence_length=8, num_samples=(99, 0, 0))
    *copies, more = forecast(config).warnings
    assert [text[:21] for text in copies] == [f"s{n:02} has tokens of s00" for n in range(1, 21)]
    assert more == "and 9 more like these"


@pytest.mark.parametrize(
    ("changes", "first", "text"),
    [
        ({"samples": 900}, None, "no sample changes that both runs have"),
        ({"code": 31}, 96, "position 96 is the first one that changes; all before it stay, with"),
        ({"until": 124}, 116, "phases.2 from sample 120"),
        ({"skip": 32}, 32, "skips: [], now [[32, 44]]"),
        ({"weight": 21}, 0, "phases.0 from sample 0.shares.code: 0."),
    ],
)
def test_a_change(
    changes: dict[str, Any], first: int | None, text: str, folder: Path, verb: Any
) -> None:
    runs = "--diff", write_run(folder), write_run(folder, "new.yaml", **changes)
    assert text in verb("plan", *runs)
    assert json.loads(verb("plan", *runs, "--json"))["first_changed_position"] == first


def test_a_change_of_a_run_that_ends_at_its_caps(folder: Path, verb: Any) -> None:
    end = "8, weights: {web: 0}"
    old = write_run(folder, length=end)
    for code, text in ((30, "no sample changes"), (31, "position 96 is the first")):
        new = write_run(folder, "new.yaml", length=end, code=code, samples=900)
        assert text in verb("plan", "--diff", old, new)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": "5e1"}, "source code: weight must be a number (in YAML 50 or 5.0e+1"),
        ({"weight": ".nan"}, "source code: weight must be between 0 and 1e+300, not nan"),
        ({"until": 122}, "phase 2, from sample 122, has another sequence length, and must start"),
        ({"more": "train-iters: 5"}, "train_samples is 300, train_iters 5: leave one out"),
        ({"length": "8, weights: {web: 0}"}, "sample 143, position 139: raise"),
        ({"length": "8, weights: {web: 0}"}, "or end the run there"),
        ({"code": "9, web: 0", "until": 160}, "raise it, or end the phase there"),
        ({"code": "1, code: 2"}, "it gives code twice: leave one out"),
        ({"folder": "/nowhere"}, "source web: /nowhere/web.bin not found: give the pair's path"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str, folder: Path, verb: Any) -> None:
    error = verb("plan", write_run(folder, **changes), status=1)
    assert message in error
    assert error.count("\n") == 1
