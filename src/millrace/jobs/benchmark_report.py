"""The result of `bench`, and its text for people."""

from dataclasses import dataclass
from typing import Any

from millrace.checks import text_table
from millrace.jobs.bucket_budget import budget_lines


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measurement, over all ranks.

    Attributes:
        name: "cold", "paced" (with simulated steps) or "warm".
        seconds: Length of the measurement.
        step_time: Seconds of a simulated step; 0: no pause between batches.
        num_steps: Number of steps of all ranks.
        samples_per_second, tokens_per_second: Rates of all ranks together.
        accelerators: Number of accelerators that this rate feeds; None with simulated steps.
        cores: Number of cores that were busy with all threads of the ranks.
        disk_bytes_per_second: Bytes read from disks.
        wait_share: Share of the time that the consumer waited for its batches, 0 to 1.
        wait_median, wait_percentile_99, wait_longest: Seconds of a wait, over all steps and ranks.
        bound_by: "step", "disk", "CPU" or "other".
        reason: Measured quantities that decided `bound_by`.
    """

    name: str
    seconds: float
    step_time: float
    num_steps: int
    samples_per_second: float
    tokens_per_second: float
    accelerators: int | None
    cores: float
    disk_bytes_per_second: float
    wait_share: float
    wait_median: float
    wait_percentile_99: float
    wait_longest: float
    bound_by: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """What `bench` measured.

    Attributes:
        num_files: Number of token files of the training data.
        num_samples: Number of training samples.
        num_measured: Number of those before another sequence length; others are not measured.
        sequence_length: Tokens in a sample of those.
        options: The `BenchOptions`, with the fields that the batches had.
        num_cores: Number of cores that this process may use.
        page_cache: Text on the run's files in the page cache.
        opening_seconds: Time to open the data, and to load or build their indices, on the slowest
            rank.
        first_batch_seconds: Time to the first batch, opening included, on the slowest rank.
        measurements: The measurements, in order.
        buckets: What the run takes from buckets, see `budget_of`; None: its files are not in one.
    """

    num_files: int
    num_samples: int
    num_measured: int
    sequence_length: int
    options: dict[str, Any]
    num_cores: int
    page_cache: str
    opening_seconds: float
    first_batch_seconds: float
    measurements: list[Measurement]
    buckets: dict[str, float] | None = None


def format_result(result: BenchResult) -> str:
    """The result as text for people: the facts, a row for each measurement, and accelerators."""
    options = result.options
    prefetch = "automatic" if options["prefetch"] is None else options["prefetch"]
    lines = [
        f"data         token files {result.num_files}, {result.num_measured:,} samples of "
        f"{result.sequence_length:,} tokens, of {result.num_samples:,} in all",
        f"loader       micro batch {options['micro_batch_size']}, ranks {options['ranks']}, "
        f"threads {options['threads']}, prefetch {prefetch}",
        f"batch        {', '.join(options['fields'])} ({options['token_dtype']})",
        f"machine      {result.num_cores} cores",
        f"page cache   {result.page_cache}",
        f"first batch  {_time(result.first_batch_seconds)}, of which "
        f"{_time(result.opening_seconds)} to open the data and their indices",
        "",
    ]
    rows = [["", "samples/s", "tokens/s", "waited", "median", "99 %", "longest"]]
    for one in result.measurements:
        label = f"{one.name}, {_time(one.step_time)} steps" if one.step_time else one.name
        rates = f"{one.samples_per_second:,.0f}", f"{one.tokens_per_second:,.0f}"
        times = map(_time, (one.wait_median, one.wait_percentile_99, one.wait_longest))
        rows.append([label, *rates, f"{one.wait_share:.1%}", *times])
    bounds = ["bound by", *(f"{one.bound_by}: {one.reason}" for one in result.measurements)]
    lines += map("   ".join, zip(text_table(rows), bounds, strict=True))
    feeds = [
        f"{one.name} data feed {one.accelerators:,} accelerators of "
        f"{options['accelerator_tokens_per_second']:,.0f} tokens/s each"
        for one in result.measurements
        if one.accelerators is not None
    ]
    budget = [] if result.buckets is None else budget_lines(result.buckets)
    return "\n".join([*lines, "", *feeds, *budget])


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
