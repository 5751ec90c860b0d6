"""A picture of the domains' shares along the output of a global shuffle."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.errors import ConfigError
from millrace.inspect.pictures import COLOURS, INK, Picture
from millrace.inspect.shards import parts_of
from millrace.shards.metadata import ShardsMetadata, metadata_path
from millrace.shuffling.distribution import Parts

_WIDTH, _LEFT, _RIGHT = 900, 70, 670  # pixels: of the picture, and the ends of its plots
_TITLE, _PLOT, _GAP, _FOOT = 64, 220, 64, 40
_MOST_DOMAINS = 10  # with a colour of their own; the smaller ones are one band
_OTHERS = "#b8b8b8"
_LEAST_SCALE = 4  # standard deviations


@dataclass(frozen=True, kw_only=True)
class _Bands:
    """Domains, each with a colour; the smaller ones are one band."""

    names: list[str]
    colours: list[str]
    parts: Parts

    @property
    def edges(self) -> NDArray[np.float64]:
        """Where the windows begin and end in the picture."""
        return np.linspace(_LEFT, _RIGHT, len(self.parts.counts) + 1)


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
    bands = _bands([*metadata.domain_stats], parts_of(metadata, name, "windows"))
    item = "documents" if metadata.has_documents else "sequences"
    height = _TITLE + 2 * _PLOT + _GAP + _FOOT
    picture = Picture(_WIDTH, height)
    picture.text(_LEFT, 24, "Shares of the domains along the output", size=17)
    title = f"{metadata.num_items:,} {item} in {metadata.num_shards:,} shards"
    title = f"{name + ': ' if name else ''}{title}, {len(bands.parts.counts)} windows"
    picture.text(_LEFT, 46, title)
    _draw_shares(picture, bands, _TITLE)
    _draw_legend(picture, bands)
    _draw_deviations(picture, bands, _TITLE + _PLOT + _GAP)
    picture.text(_LEFT, height - 12, "first item")
    picture.text(_RIGHT, height - 12, "last item", anchor="end")
    return picture.svg()


def _bands(names: list[str], parts: Parts) -> _Bands:
    """The largest domains in their order, and all others as one."""
    counts, totals = parts.counts, parts.totals
    occupied = np.flatnonzero(totals)
    largest = np.sort(occupied[np.argsort(-totals[occupied], kind="stable")[:_MOST_DOMAINS]])
    others = np.setdiff1d(occupied, largest)
    table, labels = counts[:, largest], [names[n] for n in largest.tolist()]
    colours = list(COLOURS[: len(labels)])
    if others.size > 0:
        labels.append(f"{others.size:,} smaller domains")
        colours.append(_OTHERS)
        table = np.column_stack([table, counts[:, others].sum(axis=1)])
    parts = Parts(name=parts.name, counts=table, totals=table.sum(axis=0))
    return _Bands(names=labels, colours=colours, parts=parts)


def _draw_shares(picture: Picture, bands: _Bands, top: int) -> None:
    counts, edges = bands.parts.counts, bands.edges
    # The upper edge of each band in each window: 0 is the bottom of the plot, 1 its top.
    tops = np.cumsum(counts, axis=1) / counts.sum(axis=1, keepdims=True)
    lower = np.zeros(len(counts))
    for colour, upper in zip(bands.colours, tops.T, strict=True):
        forth = _steps(edges, top + _PLOT * (1 - upper))
        back = _steps(edges[::-1], top + _PLOT * (1 - lower[::-1]))
        picture.shape("path", d=f"M{forth}L{back}Z", fill=colour, fill_opacity=0.85)
        lower = upper
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = top + _PLOT * (1 - share)
        picture.shape("path", d=f"M{_LEFT - 4} {y:.1f}H{_LEFT}", stroke=INK)
        picture.text(_LEFT - 8, y + 4, f"{share:.0%}", anchor="end")
    expected = np.cumsum(bands.parts.totals)[:-1] / counts.sum()
    for y in (top + _PLOT * (1 - expected)).tolist():
        line = f"M{_LEFT} {y:.1f}H{_RIGHT}"
        picture.shape("path", d=line, stroke="#fff", stroke_dasharray="4 4")


def _draw_deviations(picture: Picture, bands: _Bands, top: int) -> None:
    scores = bands.parts.deviations
    scale = max(_LEAST_SCALE, float(np.ceil(np.abs(scores).max(initial=0))))
    middle, unit = top + _PLOT / 2, _PLOT / 2 / scale
    title = "Deviation from the expected share, in standard deviations"
    picture.text(_LEFT, top - 12, title)
    band = {"y": middle - 3 * unit, "height": 6 * unit}
    picture.shape("rect", x=_LEFT, width=_RIGHT - _LEFT, fill="#eef3ee", **band)
    for score in (-scale, -3, 0, 3, scale):
        picture.horizontal(_LEFT, _RIGHT, middle - unit * score, f"{score:+g}" if score else "0")
    centres = (bands.edges[:-1] + bands.edges[1:]) / 2
    for colour, column in zip(bands.colours, scores.T, strict=True):
        points = zip(centres.tolist(), (middle - unit * column).tolist(), strict=True)
        dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points)  # round ends make dots of them
        picture.shape("path", d=dots, stroke=colour, stroke_width=5, stroke_linecap="round")


def _draw_legend(picture: Picture, bands: _Bands) -> None:
    shares = bands.parts.totals / bands.parts.totals.sum()
    x, last = _RIGHT + 16, len(bands.names) - 1
    rows = zip(bands.names, bands.colours, shares.tolist(), strict=True)
    for row, (name, colour, share) in enumerate(rows):
        y = _TITLE + 12 + 20 * (last - row)  # as in the plot: the first domain at the bottom
        label = name if len(name) <= 20 else f"{name[:19]}…"
        picture.shape("rect", x=x, y=y - 10, width=12, height=12, fill=colour)
        picture.text(x + 18, y, f"{label} {share:.2%}")


def _steps(edges: NDArray[np.float64], heights: NDArray[np.float64]) -> str:
    """The points of a line with a step at each edge."""
    points = zip(edges[:-1], edges[1:], heights, strict=True)
    return "L".join(f"{left:.1f} {y:.1f}L{right:.1f} {y:.1f}" for left, right, y in points)
