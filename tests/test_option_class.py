"""An option class gives checks, identity and arguments of the command line."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.errors import ConfigError
from millrace.option_class import (
    Options,
    StrPath,
    add_options,
    identity_of,
    option,
    parse_escapes,
    parse_size,
    take_options,
)


def check_pair(name: str, value: Any) -> tuple[int, int]:
    if len(value) != 2:
        raise ConfigError(f"{name} must be a pair, not {value}")
    return value[0], value[1]


def parse_pair(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("/")))


@dataclass(frozen=True, kw_only=True)
class JobOptions(Options):
    inputs: Sequence[StrPath] = option("files to read", flags="--input")
    output: StrPath = option("folder for the result", flags="output", metavar="DIR")
    seed: int = option("seed of the order, 0 | more", 42, least=0, most=2**63 - 1)
    workers: int | None = option(
        "worker processes",
        None,
        least=1,
        most=1024,
        default_text="one per core",
        identity="never",
        group="job",
    )
    rate: float = option("100 % of it", 0.5, least=0, most=1)
    plan: str = option("how it is done", "auto", choices=("auto", "fast"), group="job")
    keys: Sequence[str] = option("keys to read", ("text",))
    memory: int | None = option("limit", None, least=1, parse=parse_size, metavar="SIZE")
    checksums: bool = option("write no checksums", True)
    restart: bool = option("start again", False, identity="never")
    shard: tuple[int, int] | None = option(
        "a part", None, check=check_pair, parse=parse_pair, metavar="I/N"
    )
    tokenizer: Any = option("an object", None, flags=None, identity="never")


def make(**options: Any) -> JobOptions:
    return JobOptions(**{"inputs": ["a"], "output": "out", **options})


def test_values_become_plain() -> None:
    options = make(inputs=[Path("a"), b"b"], seed=np.uint8(3), rate=1, keys=["x"], restart=np.True_)
    assert (options.inputs, options.seed, options.rate) == (("a", "b"), 3, 1.0)
    assert type(options.seed) is int
    assert type(options.rate) is float
    assert options.keys == ("x",)
    assert options.restart is True
    assert make(workers=1024, shard=[0, 2]).shard == (0, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, r"^seed must be between 0 and 2\*\*63 - 1, not -1$"),
        ({"seed": 1.0}, "^seed .* a whole number"),
        ({"workers": 0}, "^workers must be between 1 and 1024, not 0$"),
        ({"rate": float("nan")}, "^rate must be between 0 and 1, not nan$"),
        ({"plan": "slow"}, "^plan must be one of auto, fast, not 'slow'$"),
        ({"keys": "text"}, "^keys must be a list"),
        ({"keys": [1]}, r"^keys\[0\] must be a text, not 1$"),
        ({"inputs": "a"}, "^inputs .* a list"),
        ({"output": None}, "^output .* a path"),
        ({"checksums": 1}, "^checksums .* True or False"),
        ({"shard": (1, 2, 3)}, "^shard must be a pair"),
    ],
)
def test_a_wrong_value_is_named_with_its_limits(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_the_identity_has_what_decides_the_output() -> None:
    identity = identity_of(make(workers=3))
    assert identity == {
        "inputs": ["a"],
        "output": "out",
        "seed": 42,
        "rate": 0.5,
        "plan": "auto",
        "keys": ["text"],
        "memory": None,
        "checksums": True,
        "shard": None,
    }
    assert json.loads(json.dumps(identity)) == identity


def parse(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser("job")
    add_options(parser, JobOptions)
    return vars(parser.parse_args(arguments))


def test_the_command_line_has_the_options() -> None:
    assert parse("out", "--input", "a", "b") == {"output": "out", "inputs": ["a", "b"]}
    text = "out --input a --seed 7 --workers 2 --rate .25 --plan fast --keys x y --memory 5K"
    values = parse(*text.split(), "--no-checksums", "--restart", "--shard", "1/2")
    values["tokenizer"] = "an object"
    values["report"] = "stays"
    options = JobOptions(**take_options(JobOptions, values))
    assert values == {"report": "stays"}
    assert options == make(
        seed=7,
        workers=2,
        rate=0.25,
        plan="fast",
        keys=["x", "y"],
        memory=5000,
        checksums=False,
        restart=True,
        shard=(1, 2),
        tokenizer="an object",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("out", "arguments are required: --input"),
        ("--input a", "arguments are required: DIR"),
        ("out --input a --workers 0", "--workers: workers must be between 1 and 1024, not 0"),
        ("out --input a --seed x", "--seed: seed "),
        ("out --input a --plan slow", "--plan: plan must be one of auto, fast, not 'slow'"),
        ("out --input a --memory 1X", "--memory: '1X' is not a size; write 500M or 20G"),
        ("out --input a --tokenizer x", "unrecognized arguments"),
    ],
)
def test_wrong_usage_ends_with_2(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_help_has_groups_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    for line in (
        "files to read\n",
        "seed of the order, 0 | more (default: 42)",
        "100 % of it (default: 0.5)",
        "worker processes (default: one per core)",
        "keys to read (default: text)",
        "write no checksums\n",
        "--shard I/N",
    ):
        assert line in text
    text = text.partition("\njob:\n")[2]
    assert text.index("--workers N") < text.index("--plan {auto,fast}")


def test_sizes_and_escapes() -> None:
    sizes = [parse_size(text) for text in "7 2k 3M 20G 1T".split()]
    assert sizes == [7, 2000, 3 * 10**6, 20 * 10**9, 10**12]
    for text in ("", "0", "-1", "1.5G", "G", "5X"):
        with pytest.raises(ConfigError, match="size"):
            parse_size(text)
    assert parse_escapes(r"\n\t\\n|") == "\n\t\\n|"
