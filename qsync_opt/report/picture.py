"""`Picture`: something drawn in two widths, with the words that say what it shows.

In a page both widths are there as SVG and the style sheet shows the one that fits; the words
are the text alternative. As a file it is a PNG of the wide one.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from qsync_opt.report import looks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Widths in inches. The narrow one fills a phone of 360 pixels with 91 pixels an inch, so that
#: text of 7.5 points, the smallest, has 9.5 pixels.
WIDE, NARROW = 8.6, 3.6

_METADATA = re.compile(r"<metadata>.*?</metadata>\s*", re.DOTALL)
_ROOT = re.compile(r"<svg\b[^>]*?viewBox=\"([^\"]+)\"[^>]*>")
_STYLE = re.compile(r"<style type=\"text/css\">.*?</style>", re.DOTALL)
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")
_PATH = re.compile(r"\bd=\"[^\"]*\"")
_DIGITS = re.compile(r"(\.\d\d)\d+")  # hundredths of a point are enough
_ROLE_OF = {looks.light(role): role for role in looks.COLOURS}


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawing.

    Attributes:
        name: of its files, and part of ids in the page; letters, digits and hyphens.
        title: what it shows, in a few words.
        description: what can be seen in it, in sentences: the text alternative.
        draw: makes the figure for a width in inches.
    """

    name: str
    title: str
    description: str
    draw: Callable[[float], Figure]

    def png(self) -> bytes:
        """The wide drawing on light paper."""
        stream = io.BytesIO()
        with looks.drawing():
            self.draw(WIDE).savefig(stream, format="png", dpi=looks.DOTS_PER_INCH)
        return stream.getvalue()

    def html(self) -> str:
        """Both drawings as one `figure` element."""
        wide = self._svg(WIDE, "wide")
        narrow = self._svg(NARROW, "narrow")
        return (
            f'<figure id="picture-{self.name}">\n{wide}\n{narrow}\n'
            f"<figcaption>{escape(self.title)}</figcaption>\n</figure>"
        )

    def _svg(self, width: float, size: str) -> str:
        stream = io.StringIO()
        with looks.drawing():
            self.draw(width).savefig(stream, format="svg", metadata={"Date": None})
        return inline(stream.getvalue(), f"{self.name}-{size}", size, self.title, self.description)


def inline(svg: str, prefix: str, css_class: str, title: str, description: str) -> str:
    """An SVG file of matplotlib as an element of an HTML page.

    Args:
        svg: the file.
        prefix: makes the ids in it different from those of other pictures in the page.
        css_class: of the element.
        title: what it shows, for those who do not see it.
        description: the same in sentences.
    """
    body = svg[svg.index("<svg") :]
    body = _STYLE.sub("", _METADATA.sub("", body))
    # An SVG inside HTML needs no namespaces.
    body = re.sub(r"\bid=\"([^\"]+)\"", rf'id="{prefix}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", body)
    body = re.sub(r"xlink:href=\"#([^\"]+)\"", rf'href="#{prefix}-\1"', body)
    body = _COLOUR.sub(_variable, body)
    body = _PATH.sub(lambda match: _DIGITS.sub(r"\1", match.group()), body)
    # A family that is not installed would fall back to one with serifs.
    body = re.sub(r"font:([^;\"]*?)'[^;\"]*", r"font:\1var(--font)", body)
    head = (
        f'<svg class="{css_class}" role="img" viewBox="\\1"'
        f' aria-labelledby="{prefix}-title {prefix}-text">'
        f'<title id="{prefix}-title">{_literal(title)}</title>'
        f'<desc id="{prefix}-text">{_literal(description)}</desc>'
    )
    return _ROOT.sub(head, body, count=1).strip()


def _literal(text: str) -> str:
    return escape(text).replace("\\", r"\\")


def _variable(match: re.Match[str]) -> str:
    """The variable of a colour that has a role; others (none in our pictures) stay."""
    role = _ROLE_OF.get(match.group())
    return match.group() if role is None else f"var(--{role})"
