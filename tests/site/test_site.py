"""The built site needs no network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.site.pages import ROOT

_LOADED = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=\"?((?:https?:)?//[^\s\">]+)"
)


def test_pages_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    pages = [*tmp_path.rglob("*.html")]
    assert len(pages) > 25
    assert {page: found for page in pages if (found := _LOADED.findall(page.read_text()))} == {}
