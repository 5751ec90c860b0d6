"""A picture of the domains' shares along the output of a global shuffle, as SVG."""

import os
from collections.abc import Iterator
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from millrace.errors import ConfigError
from millrace.inspect.description import parts_of
from millrace.shards.metadata import ShardsMetadata, metadata_path
from millrace.shuffling.permutations import Parts

_WIDTH, _LEFT, _RIGHT = 900, 70, 670  # pixels: of the picture, and the ends of its plot
_TITLE, _PLOT, _FOOT = 64, 220, 40
_INK = "#222"
_COLOURS = "#3b6fb5 #e08a2b #4f9d5b #c1483f #8363b0 #8c6248 #d681b6 #5f7f8f #b0aa37 #3aa7b5".split()
_ALL_COLOURS = [*_COLOURS, "#b8b8b8"]  # the last: domains without their own


def shares_svg(metadata: ShardsMetadata, *, folder: str | os.PathLike[str] = "") -> str:
    """An SVG of the share of each domain in 64 windows of the output, one on top of the other.

    Dashed lines are the expected shares. The title names the folder. A ConfigError for metadata
    without a distribution, a DataError if it does not fit them.
    """
    name = os.fspath(folder)
    if not metadata.distribution:
        raise ConfigError(
            f"{metadata_path(name)} has no distribution, from which the picture is drawn: "
            "`millrace shuffle` writes one"
        )
    bands = _bands(parts_of(metadata, name, "windows"))
    height = _TITLE + _PLOT + _FOOT
    item = "documents" if metadata.has_documents else "sequences"
    title = f"{metadata.num_items:,} {item} in {metadata.num_shards:,} shards"
    title = f"{name + ': ' if name else ''}{title}, {len(bands.counts)} windows"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 '
        f'0 {_WIDTH} {height}" font-family="sans-serif" font-size="13" fill="{_INK}">',
        _shape("rect", width=_WIDTH, height=height, fill="#fff"),
        _text(_LEFT, 24, "Shares of the domains along the output", size=17),
        _text(_LEFT, 46, title),
        *_shares(bands),
        *_legend(bands),
        _text(_LEFT, height - 12, "first item"),
        _text(_RIGHT, height - 12, "last item", anchor="end"),
    ]
    return "\n".join([*lines, "</svg>", ""])


def _shape(name: str, **attributes: float | str) -> str:
    """A "path" or "rect" with attributes of SVG, `_` for `-`; it covers what stands before it."""
    items = attributes.items()
    text = " ".join(f"{key.replace('_', '-')}={quoteattr(str(value))}" for key, value in items)
    return f"<{name} {text}/>"


def _text(x: float, y: float, text: str, *, size: int = 13, anchor: str = "start") -> str:
    """A line of text, whose start, or `anchor`, is at x."""
    text = "".join(one if one.isprintable() else "?" for one in text)  # else it may not be XML
    place = f'x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(text)}</text>"


def _bands(parts: Parts) -> Parts:
    """The largest domains in their order, and all others as one."""
    order = np.argsort(-parts.totals, kind="stable")[: np.count_nonzero(parts.totals)]
    largest, others = np.sort(order[: len(_COLOURS)]), order[len(_COLOURS) :]
    counts, names = parts.counts[:, largest], [parts.domains[n] for n in largest.tolist()]
    if others.size > 0:
        names.append(f"{others.size:,} smaller domains")
        counts = np.column_stack([counts, parts.counts[:, others].sum(axis=1)])
    return Parts(parts.name, tuple(names), counts, counts.sum(axis=0))


def _shares(bands: Parts) -> Iterator[str]:
    bottom, edges = _TITLE + _PLOT, np.linspace(_LEFT, _RIGHT, len(bands.counts) + 1)
    tops = bottom - _PLOT * np.cumsum(bands.counts, axis=1) / bands.sizes[:, None]
    # The last band first, each down to the bottom: the next one covers what is not its own.
    for colour, column in [*zip(_ALL_COLOURS, tops.T, strict=False)][::-1]:
        steps = (f"V{y:.1f}H{x:.1f}" for y, x in zip(column, edges[1:], strict=True))
        yield _shape("path", d=f"M{_LEFT} {bottom}{''.join(steps)}V{bottom}Z", fill=colour)
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = bottom - _PLOT * share
        yield _shape("path", d=f"M{_LEFT - 4} {y:.1f}H{_LEFT}", stroke=_INK)
        yield _text(_LEFT - 8, y + 4, f"{share:.0%}", anchor="end")
    expected = np.cumsum(bands.totals)[:-1] / bands.totals.sum()
    for y in (bottom - _PLOT * expected).tolist():
        yield _shape("path", d=f"M{_LEFT} {y:.1f}H{_RIGHT}", stroke="#fff", stroke_dasharray="4 4")


def _legend(bands: Parts) -> Iterator[str]:
    shares = (bands.totals / bands.totals.sum()).tolist()
    rows = zip(bands.domains, _ALL_COLOURS, shares, strict=False)
    for row, (name, colour, share) in enumerate(rows):
        x, y = _RIGHT + 16, _TITLE + 12 + 20 * (len(shares) - 1 - row)  # as in the plot: upwards
        label = name if len(name) <= 20 else f"{name[:19]}…"
        yield _shape("rect", x=x, y=y - 10, width=12, height=12, fill=colour)
        yield _text(x + 18, y, f"{label} {share:.2%}")
