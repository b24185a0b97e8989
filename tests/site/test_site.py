"""The site needs no network. `make check` builds it."""

from __future__ import annotations

import re

from mkdocs.config import load_config

from tests.site.pages import PAGES, ROOT

_LOADED = re.compile(
    r"!\[[^\]]*\]\((?:https?:)?//|<(?:script|link|img|iframe)\b[^>]*(?:https?:)?//"
)


def test_pages_load_nothing_from_elsewhere() -> None:
    config = load_config(str(ROOT / "mkdocs.yml"))
    # The theme would load fonts from a server.
    assert config.theme["font"] is False
    assert [
        path for path in (*config.extra_css, *config.extra_javascript) if "//" in str(path)
    ] == []
    texts = {page: (ROOT / page).read_text() for page in PAGES if page.startswith("docs/")}
    assert {page: found for page, text in texts.items() if (found := _LOADED.findall(text))} == {}
