"""Calls by which a file, a repository or a prompt could run a program: the sources have none.

Most are found by the S rules of ruff, see pyproject.toml; these are the ones that it does not know.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path for name in ("glm_grpo", "rewards", "benchmarks") for path in (ROOT / name).rglob("*.py")
)
SCRIPTS = sorted((ROOT / "glm_grpo" / "studio" / "gallery" / "static").glob("*.js"))
TEMPLATES = sorted((ROOT / "glm_grpo" / "studio" / "gallery" / "templates").glob("*"))


@pytest.mark.parametrize(
    "danger",
    [
        r"trust_remote_code=(?!False)",
        r"allow_pickle=(?!False)",
        r"\btorch\.load\((?![^)]*weights_only=True)",
        r"\btorch\.jit\.load\(",
        r"\bAuto\w+\.from_pretrained\((?![^)]*trust_remote_code=False)",
        r"\binstantiate\(",
        r"\bMarkup\(",
    ],
)
def test_sources_have_no_call_that_runs_what_it_reads(danger: str) -> None:
    assert [path for path in SOURCES if re.search(danger, path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    ("call", "place"),
    [
        (r"\bImage\.open\(", "rewards/images.py"),
        (r"\bhttpx\.(AsyncClient|Client|get|post|request|stream)\(", "rewards/http_client.py"),
    ],
)
def test_images_and_answers_come_in_at_one_place_with_its_bounds(call: str, place: str) -> None:
    found = [path for path in SOURCES if re.search(call, path.read_text(encoding="utf-8"))]
    assert [str(path.relative_to(ROOT)) for path in found] == [place]


def test_scripts_of_the_gallery_make_no_markup_or_code_of_text() -> None:
    assert SCRIPTS
    ways = (
        r"innerHTML|outerHTML|insertAdjacentHTML|dangerouslySetInnerHTML|srcdoc"
        r"|document\.write|\beval\(|new Function|javascript:|DOMParser"
    )
    found = {path.name: re.findall(ways, path.read_text(encoding="utf-8")) for path in SCRIPTS}
    assert {name: matches for name, matches in found.items() if matches} == {}


def test_templates_never_take_a_text_for_markup_and_their_pages_load_nothing_foreign() -> None:
    assert TEMPLATES
    for path in TEMPLATES:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\|\s*safe\b|autoescape", text), path.name
        if "<!DOCTYPE html>" in text:
            assert "default-src 'none'" in text, path.name
            assert not re.search(r"""(src|href)=["']?(https?:)?//""", text), path.name
