"""Pictures as SVG, made of texts, lines and areas."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

COLOURS = (
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
"""Colours that can be told apart."""

INK, GRID = "#222", "#ddd"


class Picture:
    """An SVG picture on white; what is drawn later covers what was drawn before.

    Args:
        width, height: Size in pixels.

    >>> picture = Picture(100, 50)
    >>> picture.text(10, 20, "a < b")
    >>> picture.shape("path", d="M10 30H90", stroke=GRID)
    >>> "a &lt; b" in picture.svg()
    True
    """

    def __init__(self, width: int, height: int) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13" '
            f'fill="{INK}">'
        ]
        self.shape("rect", width=width, height=height, fill="#fff")

    def shape(self, name: str, **attributes: float | str) -> None:
        """Draws a shape of SVG: "path" or "rect"; `_` in a name stands for `-`."""
        text = " ".join(
            f"{key.replace('_', '-')}={quoteattr(str(value))}" for key, value in attributes.items()
        )
        self._lines.append(f"<{name} {text}/>")

    def text(self, x: float, y: float, text: str, *, size: int = 13, anchor: str = "start") -> None:
        """Writes a line of text; `anchor` says which end of it is at x."""
        text = "".join(one if one.isprintable() else "?" for one in text)  # else it may not be XML
        self._lines.append(
            f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )

    def horizontal(self, left: float, right: float, y: float, label: str) -> None:
        """Draws a line of a grid, with its label to the left of it."""
        self.shape("path", d=f"M{left} {y:.1f}H{right}", stroke=GRID)
        self.text(left - 8, y + 4, label, anchor="end")

    def svg(self) -> str:
        """The picture as the text of an SVG file."""
        return "\n".join([*self._lines, "</svg>"]) + "\n"
