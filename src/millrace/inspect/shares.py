"""A picture of the domains' shares along the output of a global shuffle, as SVG."""

import os
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from millrace.checks import printable
from millrace.errors import ConfigError
from millrace.inspect.description import parts_of
from millrace.shards.metadata import ShardsMetadata, metadata_path
from millrace.shuffling.permutations import Parts

_WIDTH, _LEFT, _RIGHT = 900, 70, 670  # pixels: of the picture, and the ends of its plot
_TITLE, _PLOT, _FOOT = 64, 220, 40
_HEIGHT = _TITLE + _PLOT + _FOOT
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
    parts = parts_of(metadata, name, "windows")
    item = "documents" if metadata.has_documents else "sequences"
    title = f"{metadata.num_items:,} {item} in {metadata.num_shards:,} shards"
    title = f"{name + ': ' if name else ''}{title}, {len(parts.counts)} windows"
    return bands_picture("Shares of the domains along the output", title, parts, "item")


def bands_picture(title: str, about: str, parts: Parts, item: str) -> str:
    """An SVG of shares along what has a first and a last item, one on top of the other, with
    numbers under the pointer."""
    bands = _bands(parts)
    ends = (
        text(_LEFT, _HEIGHT - 12, f"first {item}"),
        text(_RIGHT, _HEIGHT - 12, f"last {item}", anchor="end"),
    )
    return picture(title, about, [*_shares(bands), *_legend(bands), *ends, *_pointed(bands)])


def _pointed(bands: Parts) -> Iterator[str]:
    """Nothing that is seen; a browser shows the title of what is under the pointer."""
    edges = np.linspace(_LEFT, _RIGHT, len(bands.counts) + 1).tolist()
    for number, counts in enumerate(bands.counts / bands.sizes[:, None]):
        pairs = [*zip(bands.domains, counts.tolist(), strict=True)][::-1]  # as in the plot
        rows = [f"{printable(name)} {share:.2%}" for name, share in pairs]
        title = "\n".join([f"{bands.name} {number + 1} of {len(bands.counts)}", *rows])
        place = {"x": edges[number], "width": edges[number + 1] - edges[number]}
        area = _shape("rect", **place, y=_TITLE, height=_PLOT, fill="#fff", opacity=0)
        yield f"<g><title>{escape(title)}</title>{area}</g>"


def picture(title: str, about: str, lines: Sequence[str]) -> str:
    """An SVG with a title, a line below it, and shapes."""
    start = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 '
        f'0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="13" fill="{_INK}">',
        _shape("rect", width=_WIDTH, height=_HEIGHT, fill="#fff"),
        text(_LEFT, 24, title, size=17),
        text(_LEFT, 46, about),
    ]
    return "\n".join([*start, *lines, "</svg>", ""])


def polyline(row: int, name: str, values: Sequence[float]) -> list[str]:
    """A line through values from 0 to 1 along the plot, and its entry of the legend."""
    places = np.linspace(_LEFT, _RIGHT, max(len(values), 2))
    points = [
        f"{x:.1f} {_TITLE + _PLOT * (1 - y):.1f}" for x, y in zip(places, values, strict=False)
    ]
    colour, y = _COLOURS[row], _TITLE + 12 + 20 * row
    return [
        _shape("path", d="M" + "L".join(points), fill="none", stroke=colour),
        _shape("rect", x=_RIGHT + 16, y=y - 10, width=12, height=12, fill=colour),
        text(_RIGHT + 34, y, name),
    ]


def _shape(name: str, **attributes: float | str) -> str:
    """A "path" or "rect" with attributes of SVG, `_` for `-`; it covers what stands before it."""
    items = attributes.items()
    text = " ".join(f"{key.replace('_', '-')}={quoteattr(str(value))}" for key, value in items)
    return f"<{name} {text}/>"


def text(x: float, y: float, text: str, *, size: int = 13, anchor: str = "start") -> str:
    """A line of text; `anchor` says which end of it is at x."""
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
        yield text(_LEFT - 8, y + 4, f"{share:.0%}", anchor="end")
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
        yield text(x + 18, y, f"{label} {share:.2%}")
