from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from rewards.types import Prompt, RewardError
from rewards.user_functions import find_sources, load_function, name_function


def scaled(factor: float, prompts: Sequence[Prompt], pixels: Tensor) -> Tensor:
    return factor * pixels.float().mean(dim=(1, 2, 3))


@pytest.mark.parametrize("taken", ["torch", "time", "this"])
def test_a_module_of_the_name_of_an_installed_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    """One that is imported, one without a file, and one that is not imported yet."""
    monkeypatch.delitem(sys.modules, "this", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{taken}.py").write_text("def score(prompts, pixels): return 2\n")
    with pytest.raises(RewardError, match=f"the name {taken} is taken .*: {taken}.py:score"):
        load_function(f"{taken}:score", str(tmp_path))
    assert load_function(f"{taken}.py:score", str(tmp_path))([], None) == 2


def test_a_file_may_have_the_name_of_a_package_that_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "rewards.py": (
            "from dataclasses import dataclass\n"
            "from neighbour_of_a_file import value\n"
            "from rewards import Scores\n"
            "@dataclass\n"
            "class Mine:\n"
            "    scores: 'Scores'\n"
            "def sharp(prompts, pixels): return Mine(Scores([value]))\n"
        ),
        "neighbour_of_a_file.py": "value = 3.0\n",
    }
    (tmp_path / "mine").mkdir()
    for name, content in files.items():
        (tmp_path / "mine" / name).write_text(content)
    monkeypatch.chdir("/")
    before = list(sys.path)
    function = load_function("mine/rewards.py:sharp", str(tmp_path))
    assert function([], None).scores.values == [3.0]
    assert load_function(f"{tmp_path}/mine/rewards.py:sharp") is function
    assert sys.path == before
    assert find_sources("mine/rewards.py:sharp", str(tmp_path)) == {
        "mine/rewards.py": files["rewards.py"].encode(),
        "neighbour_of_a_file": files["neighbour_of_a_file.py"].encode(),
    }


def test_the_source_of_a_function_is_that_of_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/parts.py").write_text("K = 1")
    monkeypatch.chdir(tmp_path)
    assert find_sources("mine.parts:f") == {"mine.parts": b"K = 1"}
    (tmp_path / "mine/parts.py").write_text("K = 2")
    assert find_sources("mine.parts:f") == {"mine.parts": b"K = 2"}


def test_the_sources_of_a_function_are_those_that_its_package_and_folder_have(
    tmp_path: Path,
) -> None:
    files = {
        "package_of_a_user/__init__.py": "from .impl import score\n",
        "package_of_a_user/impl.py": (
            "import json, torch\n"
            "from . import scale\n"
            "def score(prompts, pixels):\n"
            "    from neighbour_of_a_user import shift\n"
        ),
        "package_of_a_user/scale.py": "FACTOR = 2\n",
        "package_of_a_user/unused.py": "FACTOR = 3\n",
        "neighbour_of_a_user.py": "def shift(): ...\n",
        "unused_of_a_user.py": "",
        "json_of_a_user.py": "",
    }
    (tmp_path / "package_of_a_user").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    found = find_sources("package_of_a_user:score", str(tmp_path))
    assert [*found] == [
        "package_of_a_user",
        "package_of_a_user.impl",
        "package_of_a_user.scale",
        "neighbour_of_a_user",
    ]
    assert found["package_of_a_user.scale"] == b"FACTOR = 2\n"
    # A function may be named where it is only imported.
    (tmp_path / "names_of_a_user.py").write_text("from package_of_a_user import score as mine\n")
    assert {*found} < {*find_sources("names_of_a_user:mine", str(tmp_path))}


def test_the_source_of_a_function_of_the_package_does_not_follow_its_imports() -> None:
    assert [*find_sources("glm_grpo.tiny.scoring:exact")] == ["glm_grpo.tiny.scoring"]


@pytest.mark.parametrize("content", ["def f(", "raise RuntimeError"])
def test_the_source_of_a_function_that_cannot_be_imported_is_no_error(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text(content)
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text(content)
    monkeypatch.chdir(tmp_path)
    assert find_sources("broken:f") == {"broken": content.encode()}
    assert find_sources("package.module:f") == {}


def test_the_source_of_a_partial_function_is_that_of_the_function() -> None:
    name = name_function(functools.partial(scaled, 2.0), "sharp")
    assert find_sources(name) == find_sources(f"{__name__}:scaled")
    assert __name__ in find_sources(name)
