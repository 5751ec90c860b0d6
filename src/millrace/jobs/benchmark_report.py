"""What `bench` measured, as text and as a picture of the waits."""

from __future__ import annotations

import math
from xml.sax.saxutils import escape

from millrace.jobs.benchmarking import BenchResult, Measurement


def format_result(result: BenchResult) -> str:
    """A result as text for people."""
    options = result.options
    each = result.accelerator_tokens_per_second
    lines = [
        f"data         token files {result.num_files}, {result.num_samples:,} samples of "
        f"{result.sequence_length:,} tokens, {result.token_bytes} bytes a token",
        f"loader       micro batch {options['micro_batch_size']}, ranks {options['ranks']}, "
        f"threads {options['threads']}, prefetch {_prefetch(result)}",
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
                f"{one.bound_by}: {one.reason}" if one.bound_by else "",
            ).rstrip()
        )
    lines.append("")
    for one in result.measurements:
        if one.accelerators is not None:
            feeds = f"{one.name} data feed {one.accelerators:,} accelerators"
            lines.append(f"{feeds} of {each:,.0f} tokens/s each")
    if result.perfect_share is not None:
        lines.append(
            f"paced reaches {result.perfect_share:.1%} of a perfect loader's rate (replay)"
        )
    return "\n".join(lines)


_ROW = "{:<22}{:>12}{:>16}{:>9}{:>11}{:>11}{:>11}   {}"


def _prefetch(result: BenchResult) -> str:
    prefetch = result.options["prefetch"]
    return "automatic" if prefetch is None else str(prefetch)


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


# ---- the picture ----

_WIDTH, _LEFT, _RIGHT = 900, 90, 20  # pixels: of the picture, and of its margins
_PANEL, _HEAD, _PLOT = 230, 46, 140  # of one measurement, its heading and its plot
_TITLE = 56
_LEAST = 1e-6  # seconds, the lower end of every plot


def waits_picture(result: BenchResult) -> str:
    """An SVG with a panel for each measurement: how long the steps of rank 0 waited, over time."""
    longest = max(one.waits.longest for one in result.measurements)
    decades = max(math.ceil(math.log10(max(longest, 1e-3) / _LEAST)), 1)
    height = _TITLE + _PANEL * len(result.measurements)
    options = result.options
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="13" fill="#222">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        _text(_LEFT, 24, "Waits for batches", size=17),
        _text(
            _LEFT,
            44,
            f"{result.num_samples:,} samples of {result.sequence_length:,} tokens, micro batch "
            f"{options['micro_batch_size']}, ranks {options['ranks']}, threads "
            f"{options['threads']}, prefetch {_prefetch(result)}",
        ),
    ]
    for number, one in enumerate(result.measurements):
        lines += _panel(one, _TITLE + number * _PANEL, decades)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(one: Measurement, top: int, decades: int) -> list[str]:
    bottom, right = top + _HEAD + _PLOT, _WIDTH - _RIGHT
    label = f"{one.name}, steps of {_time(one.step_time)}" if one.step_time else one.name
    cause = f", bound by {one.bound_by}" if one.bound_by else ""
    lines = [
        _text(_LEFT, top + 20, f"{label}: {one.samples_per_second:,.0f} samples/s{cause}", size=15),
        _text(
            _LEFT,
            top + 38,
            f"waited {one.waits.share:.1%} of the time; median {_time(one.waits.median)}, 99 % "
            f"within {_time(one.waits.percentile_99)}, longest {_time(one.waits.longest)}",
        ),
    ]
    for decade in range(decades + 1):
        y = bottom - _PLOT * decade / decades
        seconds = _LEAST * 10**decade
        lines.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#ddd"/>')
        lines.append(_text(_LEFT - 8, y + 4, _tick(seconds), anchor="end"))
    bars = []
    for second, wait in one.waits.timeline:
        x = _LEFT + (right - _LEFT) * min(second / one.seconds, 1)
        share = math.log10(max(wait, _LEAST) / _LEAST) / decades
        bars.append(f"M{x:.1f} {bottom}V{bottom - _PLOT * min(share, 1):.1f}")
    lines.append(f'<path d="{"".join(bars)}" stroke="#2a6fb0" stroke-width="1.5" fill="none"/>')
    lines.append(f'<path d="M{_LEFT} {bottom}H{right}" stroke="#222"/>')
    lines.append(_text(_LEFT, bottom + 18, "0 s"))
    lines.append(_text(right, bottom + 18, f"{one.seconds:.1f} s", anchor="end"))
    return lines


def _text(x: float, y: float, text: str, *, size: int = 13, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


def _tick(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.999 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds * 1e6:.0f} us"
