"""A picture of the domains' shares along the output of a global shuffle, as SVG."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from millrace.errors import ConfigError
from millrace.inspect.shards import deviations, domain_counts
from millrace.shards.metadata import ShardsMetadata, metadata_path

_WIDTH, _LEFT, _RIGHT = 900, 70, 230  # pixels: of the picture, and of its margins
_TITLE, _PLOT, _GAP, _FOOT = 64, 220, 64, 40
_MOST_DOMAINS = 10  # with a colour of their own; the smaller ones are one band
_OTHERS = "#b8b8b8"
_COLOURS = (
    "#3b6fb5",
    "#e08a2b",
    "#4f9d5b",
    "#c1483f",
    "#8363b0",
    "#8c6248",
    "#d681b6",
    "#5f7f8f",
    "#b0aa37",
    "#3aa7b5",
)
_LEAST_SCALE = 4  # standard deviations


def shares_svg(metadata: ShardsMetadata, *, folder: str | os.PathLike[str] = "") -> str:
    """An SVG of the domains along the output, in 64 windows.

    The upper plot has the share of each domain in each window, one on top of the other. The lower
    one has the deviations from the expected shares, in standard deviations of a fair shuffle, which
    leaves 99.7 % of them between -3 and 3.

    Args:
        metadata: Metadata of a folder of shards, with a distribution.
        folder: The folder, for the title and for messages.

    Raises:
        ConfigError: Metadata without a distribution.
        DataError: A distribution that does not fit the metadata.
    """
    name = os.fspath(folder)
    if not metadata.distribution:
        raise ConfigError(
            f"{metadata_path(name)} has no distribution, from which the picture is drawn: "
            "`millrace shuffle` writes one"
        )
    counts = domain_counts(metadata, name, "windows")
    bands, colours, counts = _bands([*metadata.domain_stats], counts)
    item = "documents" if metadata.has_documents else "sequences"
    bottom = _TITLE + _PLOT
    height = bottom + _GAP + _PLOT + _FOOT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="13" fill="#222">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        _text(_LEFT, 24, "Shares of the domains along the output", size=17),
        _text(
            _LEFT,
            46,
            f"{name + ': ' if name else ''}{metadata.num_items:,} {item} in "
            f"{metadata.num_shards:,} shards, {len(counts)} windows",
        ),
        *_share_plot(counts, colours, _TITLE),
        *_legend(bands, colours, counts),
        *_deviation_plot(counts, colours, bottom + _GAP),
        _text(_LEFT, height - 12, "first item"),
        _text(_WIDTH - _RIGHT, height - 12, "last item", anchor="end"),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _bands(
    names: Sequence[str], counts: NDArray[np.int64]
) -> tuple[list[str], list[str], NDArray[np.int64]]:
    """The largest domains in their order, and all others as one: names, colours, counts."""
    totals = counts.sum(axis=0)
    occupied = np.flatnonzero(totals)
    largest = np.sort(occupied[np.argsort(-totals[occupied], kind="stable")[:_MOST_DOMAINS]])
    others = np.setdiff1d(occupied, largest)
    bands, table = [names[n] for n in largest.tolist()], counts[:, largest]
    colours = list(_COLOURS[: len(bands)])
    if others.size > 0:
        bands.append(f"{others.size:,} smaller domains")
        colours.append(_OTHERS)
        table = np.column_stack([table, counts[:, others].sum(axis=1)])
    return bands, colours, table


def _share_plot(counts: NDArray[np.int64], colours: Sequence[str], top: int) -> list[str]:
    edges = _edges(len(counts))
    # The upper edge of each band in each window: 0 is the bottom of the plot, 1 its top.
    tops = np.cumsum(counts, axis=1) / counts.sum(axis=1, keepdims=True)
    lines = []
    lower = np.zeros(len(counts))
    for colour, upper in zip(colours, tops.T, strict=True):
        forth = _steps(edges, top + _PLOT * (1 - upper))
        back = _steps(edges[::-1], top + _PLOT * (1 - lower[::-1]))
        lines.append(f'<path d="M{forth}L{back}Z" fill="{colour}" fill-opacity="0.85"/>')
        lower = upper
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = top + _PLOT * (1 - share)
        lines.append(f'<path d="M{_LEFT - 4} {y:.1f}H{_LEFT}" stroke="#222"/>')
        lines.append(_text(_LEFT - 8, y + 4, f"{share:.0%}", anchor="end"))
    expected = np.cumsum(counts.sum(axis=0))[:-1] / counts.sum()
    for share in expected.tolist():
        y = top + _PLOT * (1 - share)
        line = (
            f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#fff" stroke-dasharray="4 4"/>'
        )
        lines.append(line)
    return lines


def _deviation_plot(counts: NDArray[np.int64], colours: Sequence[str], top: int) -> list[str]:
    scores = deviations(counts, counts.sum(axis=0))
    scale = max(_LEAST_SCALE, float(np.ceil(np.abs(scores).max(initial=0))))
    edges, right = _edges(len(counts)), _WIDTH - _RIGHT
    middle, unit = top + _PLOT / 2, _PLOT / 2 / scale
    lines = [
        _text(_LEFT, top - 12, "Deviation from the expected share, in standard deviations"),
        f'<rect x="{_LEFT}" y="{middle - 3 * unit:.1f}" width="{right - _LEFT}" '
        f'height="{6 * unit:.1f}" fill="#eef3ee"/>',
    ]
    for score in (-scale, -3, 0, 3, scale):
        y = middle - unit * score
        lines.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#ddd"/>')
        lines.append(_text(_LEFT - 8, y + 4, f"{score:+g}" if score else "0", anchor="end"))
    centres = (edges[:-1] + edges[1:]) / 2
    for colour, column in zip(colours, scores.T, strict=True):
        points = zip(centres.tolist(), (middle - unit * column).tolist(), strict=True)
        dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points)  # round ends make dots of them
        lines.append(
            f'<path d="{dots}" stroke="{colour}" stroke-width="5" stroke-linecap="round"/>'
        )
    return lines


def _legend(bands: Sequence[str], colours: Sequence[str], counts: NDArray[np.int64]) -> list[str]:
    shares = counts.sum(axis=0) / counts.sum()
    x, lines = _WIDTH - _RIGHT + 16, []
    for row, (name, colour, share) in enumerate(zip(bands, colours, shares.tolist(), strict=True)):
        # As in the plot: the first domain at the bottom.
        y = _TITLE + 12 + 20 * (len(bands) - 1 - row)
        label = name if len(name) <= 20 else f"{name[:19]}…"
        lines.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        lines.append(_text(x + 18, y, f"{label} {share:.2%}"))
    return lines


def _edges(num_windows: int) -> NDArray[np.float64]:
    return np.linspace(_LEFT, _WIDTH - _RIGHT, num_windows + 1)


def _steps(edges: NDArray[np.float64], heights: NDArray[np.float64]) -> str:
    """The points of a line with a step at each edge."""
    points = zip(edges[:-1], edges[1:], heights, strict=True)
    return "L".join(f"{left:.1f} {y:.1f}L{right:.1f} {y:.1f}" for left, right, y in points)


def _text(x: float, y: float, text: str, **style: Any) -> str:
    size, anchor = style.get("size", 13), style.get("anchor", "start")
    text = "".join(one if one.isprintable() else "?" for one in text)  # else it may not be XML
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )
