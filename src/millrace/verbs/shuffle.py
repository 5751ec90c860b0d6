"""`shuffle`."""

import contextlib
import dataclasses
import json
import sys
from typing import Any

from millrace.engine import ALREADY
from millrace.shuffling import shuffle
from millrace.shuffling.shuffle_job import ShuffleOptions
from millrace.verbs import JsonOption, Verb


def _shuffle(input_dir: str | None = None, as_json: bool = False, **options: Any) -> str:
    # Ray writes about lost nodes to stdout, which is the report's.
    with contextlib.redirect_stdout(sys.stderr):
        result = shuffle(input_dir, show_progress=True, **options)
    if as_json:
        return json.dumps(dataclasses.asdict(result))
    lines = [
        f"{result.output_dir}: {result.num_items:,} {result.unit} of {len(result.domain_stats):,} "
        f"domains in {len(result.shard_sizes):,} shards, {result.num_tokens:,} tokens"
    ]
    if ALREADY in result.notices:
        return "\n".join([*lines, ALREADY])
    rate = result.num_bytes / 1e6 / max(result.seconds, 1e-9)
    lines.append(
        f"{result.num_bytes / 1e6:,.1f} MB in {result.seconds:.1f} s, {rate:,.1f} MB/s, by the "
        f"plan {result.plan}"
    )
    if num_kept := result.num_tasks_kept:
        total = num_kept + result.num_tasks_done
        lines.append(f"{num_kept:,} of {total:,} tasks were kept from an earlier run")
    return "\n".join(lines)


VERBS = (
    Verb(
        "shuffle",
        _shuffle,
        (ShuffleOptions, JsonOption),
        "Shuffles token files globally. Cuts the token files of many domains into sequences "
        "of a fixed length, permutes all of them, and writes shards that are token files "
        "themselves. A job that was killed continues when the same command runs again.",
    ),
)
