"""What the packages import is declared, and does not come along with another package by chance."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_DECLARED = {
    "_typeshed",  # only while types are checked
    "pydantic_core",  # pydantic wants one exact version
}


def _imported(path: Path) -> set[str]:
    """Top-level names that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return {name.partition(".")[0] for name in found}


def _normalized(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = chain(project["dependencies"], *project["optional-dependencies"].values())
    declared = {_normalized(re.split("[^A-Za-z0-9._-]", line)[0]) for line in lines}
    sources = [path for name in ("glm_grpo", "rewards") for path in (ROOT / name).rglob("*.py")]
    imported = set().union(*map(_imported, sources)) - sys.stdlib_module_names - NOT_DECLARED
    distributions = packages_distributions()
    undeclared = {
        name
        for name in imported - {"glm_grpo", "rewards"}
        if declared.isdisjoint(map(_normalized, distributions.get(name, [name])))
    }
    assert undeclared == set()
