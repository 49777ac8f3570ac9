"""Reading a page as a browser would: elements, ids, tables, and what it would load."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

#: Elements that have no end tag, as far as a page here could hold them.
_VOID = frozenset({"br", "col", "hr", "img", "input", "link", "meta", "wbr"})


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def find(self, tag: str) -> list[Element]:
        found = [self] if self.tag == tag else []
        return found + [one for child in self.children for one in child.find(tag)]

    def everything(self) -> list[Element]:
        return [self, *(one for child in self.children for one in child.everything())]

    def words(self) -> str:
        return self.text + "".join(child.words() for child in self.children)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Element("document", {})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute twice in <{tag}>"
        element = Element(tag, dict(attrs))
        self._open[-1].children.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> inside <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].text += data

    def close(self) -> None:
        super().close()
        assert self._open == [self.root], f"<{self._open[-1].tag}> is not closed"


def read_page(text: str) -> Element:
    """The page as a tree; fails where tags do not match."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    return reader.root


def table_of(page: Element, name: str) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of a table; of a number its exact value, not what is shown."""
    (table,) = [one for one in page.find("table") if one.attributes.get("id") == name]
    heads = [cell.words() for cell in table.find("th")]
    rows = []
    for row in table.find("tbody")[0].find("tr"):
        cells = []
        for cell in row.find("td"):
            data = cell.find("data")
            value = data[0].attributes["value"] if data else cell.words()
            cells.append("" if value in (None, "–") else str(value))
        rows.append(cells)
    return heads, rows
