"""A reader of pages, for tests that look at what was written."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

_VOID = {"meta", "link", "img", "source", "br"}


class Page(HTMLParser):
    """A strict reading of a page: every element that is opened is closed, in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(" ".join(data.split()))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of every element of a kind."""
        return [attributes for name, attributes in self.elements if name == tag]

    def after(self, text: str, count: int) -> list[str]:
        """The texts that follow the last occurrence of one."""
        start = len(self.texts) - self.texts[::-1].index(text)
        return self.texts[start : start + count]

    def alternatives(self) -> dict[str | None, str]:
        """What stands in place of each image, by its file."""
        return {image["src"]: image["alt"] or "" for image in self.all("img")}

    def linked(self) -> set[str | None]:
        """The files that the page loads or leads to."""
        return {
            value
            for _, attributes in self.elements
            for key, value in attributes.items()
            if key in {"src", "href", "srcset"} and value != "data:,"
        }
