"""Pieces of SVG as text."""

from dataclasses import dataclass
from html import escape

WIDTH = 1140.0
"""Of every drawing, in pixels."""


@dataclass(frozen=True)
class Drawing:
    """Elements of SVG, `WIDTH` wide.

    Attributes:
        body: the elements.
        height: in pixels.
    """

    body: str
    height: float

    def svg(self, label: str) -> str:
        """As an element of a page.

        Args:
            label: says to those who cannot see it what it shows.
        """
        return (
            f'<svg viewBox="-2 0 {WIDTH + 4:g} {self.height:g}" role="img" aria-label="{escape(label)}" '
            f'width="100%">{self.body}</svg>'
        )


def element(name: str, content: str = "", *, tip: str = "", **attributes: str | float) -> str:
    """One element.

    Args:
        name: of the element.
        content: elements or escaped text inside.
        tip: what is shown when the mouse rests on it.
        attributes: a trailing underscore is dropped (`class_`), underscores become hyphens, numbers are written short.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"' for key, value in attributes.items() if value != ""
    )
    inner = (f"<title>{escape(tip)}</title>" if tip else "") + content
    return f"<{name}{written}>{inner}</{name}>" if inner else f"<{name}{written}/>"


def text(x: float, y: float, words: str, class_: str = "", anchor: str = "start") -> str:
    """A line of text whose baseline is at y."""
    return element("text", escape(words), class_=class_, x=x, y=y, text_anchor=anchor if anchor != "start" else "")


def _value(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else f"{value:.6g}"
