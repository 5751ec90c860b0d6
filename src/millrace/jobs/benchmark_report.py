"""The result of `bench` as text for people."""

from millrace.jobs.benchmarking import BenchResult


def format_result(result: BenchResult) -> str:
    options = result.options
    prefetch = "automatic" if options["prefetch"] is None else options["prefetch"]
    lines = [
        f"data         token files {result.num_files}, {result.num_samples:,} samples of "
        f"{result.sequence_length:,} tokens, {result.token_bytes} bytes a token",
        f"loader       micro batch {options['micro_batch_size']}, ranks {options['ranks']}, "
        f"threads {options['threads']}, prefetch {prefetch}",
        f"batch        {', '.join(options['fields'])} ({options['token_dtype']})",
        f"machine      {result.num_cores} cores, copies memory at "
        f"{result.copy_bytes_per_second / 1e9:.1f} GB/s (read and written)",
        f"page cache   {result.page_cache}",
        f"first batch  {_time(result.first_batch_seconds)}, of which "
        f"{_time(result.opening_seconds)} to open the data and their indices",
        "",
        _ROW.format("", "samples/s", "tokens/s", "waited", "median", "99 %", "longest", "bound by"),
    ]
    for one in result.measurements:
        label = f"{one.name}, {_time(one.step_time)} steps" if one.step_time else one.name
        lines.append(
            _ROW.format(
                label,
                f"{one.samples_per_second:,.0f}",
                f"{one.tokens_per_second:,.0f}",
                f"{one.waits.share:.1%}",
                _time(one.waits.median),
                _time(one.waits.percentile_99),
                _time(one.waits.longest),
                f"{one.bound_by}: {one.reason}",
            )
        )
    feeds = [
        f"{one.name} data feed {one.accelerators:,} accelerators of "
        f"{result.accelerator_tokens_per_second:,.0f} tokens/s each"
        for one in result.measurements
        if one.accelerators is not None
    ]
    return "\n".join([*lines, "", *feeds])


_ROW = "{:<22}{:>12}{:>16}{:>9}{:>11}{:>11}{:>11}   {}"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
