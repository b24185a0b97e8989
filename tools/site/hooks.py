"""Hooks for MkDocs: add pages from outside docs/, and render formulas as MathML."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]

_PROJECT_PAGES = {
    "CHANGELOG.md": "project/changes.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "LOG.md": "project/log.md",
    "benchmarks/RESULTS.md": "project/speeds.md",
}
"""Files of the repository that are pages of the site -> their place in the site."""

_LINK = re.compile(r"\[(?P<text>[^\]\[]*)\]\((?!\w+:|#)(?P<path>[^)\s#]+)(?P<place>#[^)\s]*)?\)")


def formula(source: str, *_: Any, **__: Any) -> str:
    """Render a ```math fence: TeX to MathML, which browsers display without a script."""
    return convert(source.strip(), display="block")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the project's own pages."""
    for path, page in _PROJECT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Redirect links that are written for the repository to the pages of the site.

    A link to a file that is not a page, such as a program, is reduced to its text.
    """
    del config, files
    uri = page.file.src_uri
    written_in = {site: path for path, site in _PROJECT_PAGES.items()}.get(uri, f"docs/{uri}")

    def lead(link: re.Match[str]) -> str:
        path = normpath(f"{dirname(written_in) or '.'}/{link['path']}")
        target = _PROJECT_PAGES.get(path)
        if target is None and path.startswith("docs/"):
            target = path.removeprefix("docs/")
        if target is not None:
            href = relpath(target, dirname(uri) or ".")
            return f"[{link['text']}]({href}{link['place'] or ''})"
        return link["text"] if (ROOT / path).exists() else link[0]

    return _LINK.sub(lead, markdown)
