"""A small SVG writer for the pictures of the documentation. The same calls always give the same bytes, so that a test
can compare a committed picture with what its script draws.

A picture brings its own background, and its colours follow the reader's light or dark preference. So it can be read on
any page.
"""

from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MONOSPACE = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'Liberation Mono', monospace"

# Name -> colour in light, colour in dark. Hues of Okabe and Ito, which colour-blind readers can tell apart.
COLOURS = {
    "paper": ("#ffffff", "#1b1f24"),
    "ink": ("#1f2328", "#e6edf3"),
    "pale": ("#59636e", "#9da7b3"),
    "rule": ("#d1d9e0", "#3d444d"),
    "grey": ("#6e7781", "#a5aeb8"),
    "brown": ("#8c6d46", "#c9a876"),
    "blue": ("#0072b2", "#56b4e9"),
    "green": ("#00805d", "#2cc295"),
    "orange": ("#b86e00", "#f0a830"),
    "red": ("#c2410c", "#ff8a57"),
    "purple": ("#a3457d", "#e08fbd"),
}


class Drawing:
    """Shapes and texts of one picture, in the order in which they are drawn. Lengths are in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-label={quoteattr(title)}>'
        )
        self._title = f"<title>{escape(title)}</title>"
        self._shapes: list[str] = []
        self.box(0, 0, width, height, fill="paper", radius=8)

    def text(
        self,
        x: float,
        y: float,
        content: str,
        *,
        colour: str = "ink",
        size: float = 15,
        anchor: str = "start",
        bold: bool = False,
        monospace: bool = False,
        turned: bool = False,
    ) -> None:
        """Write one line of text; y is its base line. A turned text reads from the bottom to the top."""
        classes = " ".join(["fill-" + colour, *["bold"] * bold, *["monospace"] * monospace])
        turn = f' transform="rotate(-90 {number(x)} {number(y)})"' if turned else ""
        self._shapes.append(
            f'<text class="{classes}" x="{number(x)}" y="{number(y)}" font-size="{number(size)}" '
            f'text-anchor="{anchor}"{turn}>{escape(content)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str | None = None,
        stroke: str | None = None,
        radius: float = 4,
        opacity: float = 1,
        dashed: bool = False,
    ) -> None:
        shape = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
        self._shapes.append(f'<rect {paint(fill, stroke, opacity, dashed)} {shape} rx="{number(radius)}"/>')

    def dot(self, x: float, y: float, radius: float, *, fill: str, stroke: str | None = None) -> None:
        self._shapes.append(
            f'<circle {paint(fill, stroke)} cx="{number(x)}" cy="{number(y)}" r="{number(radius)}"/>'
        )

    def line(
        self,
        points: list[tuple[float, float]],
        *,
        colour: str = "rule",
        width: float = 1,
        opacity: float = 1,
        dashed: bool = False,
        arrow: bool = False,
    ) -> None:
        """Draw straight pieces through the points (x, y); with `arrow` the last one ends in an arrow head."""
        places = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        shape = f'points="{places}" stroke-width="{number(width)}"'
        self._shapes.append(f"<polyline {paint(None, colour, opacity, dashed)} {shape}/>")
        if arrow:
            self._arrow_head(points[-2], points[-1], colour)

    def _arrow_head(self, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
        (x0, y0), (x, y) = start, end
        length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
        along_x, along_y = (x - x0) / length, (y - y0) / length
        corners = [
            (x - 9 * along_x + side * along_y, y - 9 * along_y - side * along_x) for side in (4.5, -4.5)
        ]
        places = " ".join(f"{number(a)},{number(b)}" for a, b in [(x, y), *corners])
        self._shapes.append(f'<polygon {paint(colour, None)} points="{places}"/>')

    def save(self, file: Path) -> None:
        file.write_text(self.svg())

    def svg(self) -> str:
        return "\n".join([self._head, self._title, style(), *self._shapes, "</svg>"]) + "\n"


def number(value: float) -> str:
    """A length with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def paint(fill: str | None, stroke: str | None, opacity: float = 1, dashed: bool = False) -> str:
    classes = f"fill-{fill or 'none'} stroke-{stroke or 'none'}"
    faint = f' opacity="{opacity:g}"' if opacity < 1 else ""
    return f'class="{classes}"{faint}' + (' stroke-dasharray="5 4"' if dashed else "")


def style() -> str:
    def rules(shade: int) -> str:
        return "\n".join(
            f".fill-{name} {{ fill: {shades[shade]} }} .stroke-{name} {{ stroke: {shades[shade]} }}"
            for name, shades in COLOURS.items()
        )

    return (
        f"<style>\ntext {{ font-family: {FONT} }}\n.monospace {{ font-family: {MONOSPACE} }}\n"
        f".bold {{ font-weight: 600 }}\n.fill-none {{ fill: none }}\n{rules(0)}\n"
        f"@media (prefers-color-scheme: dark) {{\n{rules(1)}\n}}\n</style>"
    )
