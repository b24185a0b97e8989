"""Calls by which a file, a repository or a prompt could run a program: the sources have none."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    [ROOT / "train.py"]
    + [
        path
        for name in ("glm_grpo", "rewards", "benchmarks")
        for path in (ROOT / name).rglob("*.py")
    ]
)
SCRIPTS = sorted((ROOT / "glm_grpo" / "gallery" / "static").glob("*.js"))
TEMPLATES = sorted((ROOT / "glm_grpo" / "gallery" / "templates").glob("*"))

UNPICKLERS = {"marshal", "shelve", "dill", "cloudpickle", "joblib", "pickle"}
FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.jit.load"),
    *("yaml.unsafe_load", "yaml.full_load", "pandas.read_pickle", "pd.read_pickle"),
    *("hydra.utils.instantiate", "instantiate", "Markup"),
}
REQUIRED = {
    "torch.load": ("weights_only", True),
    "AutoConfig.from_pretrained": ("trust_remote_code", False),
    "AutoModel.from_pretrained": ("trust_remote_code", False),
    "AutoProcessor.from_pretrained": ("trust_remote_code", False),
    "AutoTokenizer.from_pretrained": ("trust_remote_code", False),
}
FORBIDDEN_ARGUMENTS = {
    "trust_remote_code": True,
    "allow_pickle": True,
    "shell": True,
    "weights_only": False,
    "autoescape": False,
}
EVERY_ADDRESS = {"0.0.0.0", "::"}


def find_dangers(source: str) -> Iterator[str]:
    """What must not stand in a source, with its line."""
    for node in ast.walk(ast.parse(source)):
        for danger in (*_in_import(node), *_in_call(node)):
            yield f"line {getattr(node, 'lineno', 0)}: {danger}"
        if isinstance(node, ast.Constant) and node.value in EVERY_ADDRESS:
            yield f"line {node.lineno}: listens at every address"
        if (
            isinstance(node, ast.Attribute)
            and ast.unparse(node.value) == "pickle"
            and node.attr != "UnpicklingError"
        ):
            yield f"line {node.lineno}: pickle.{node.attr}"


def _in_import(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.module in UNPICKLERS:
        yield f"from {node.module} import"
    if isinstance(node, ast.Import):
        for alias in node.names:
            # Of pickle, the name of its error is wanted, and nothing else.
            if alias.name in UNPICKLERS and (alias.name, alias.asname) != ("pickle", None):
                yield f"import {alias.name}"


def _in_call(node: ast.AST) -> Iterator[str]:
    if not isinstance(node, ast.Call):
        return
    name = ast.unparse(node.func)
    values = {
        argument.arg: getattr(argument.value, "value", ...)
        for argument in node.keywords
        if argument.arg is not None
    }
    if name in FORBIDDEN_CALLS:
        yield name
    loaders = [ast.unparse(each.value) for each in node.keywords if each.arg == "Loader"]
    if name == "yaml.load" and loaders != ["yaml.CSafeLoader"]:
        yield name
    for argument, value in values.items():
        # What is computed could be the forbidden value.
        if argument in FORBIDDEN_ARGUMENTS and value in (FORBIDDEN_ARGUMENTS[argument], ...):
            yield f"{name}({argument}={value})"
    if name in REQUIRED:
        argument, value = REQUIRED[name]
        if values.get(argument) is not value:
            yield f"{name} without {argument}={value}"


def test_sources_have_no_call_that_runs_what_it_reads() -> None:
    found = {path: list(find_dangers(path.read_text(encoding="utf-8"))) for path in SOURCES}
    assert {path: dangers for path, dangers in found.items() if dangers} == {}


@pytest.mark.parametrize(
    ("call", "place"),
    [
        (r"\bImage\.open\(", "rewards/pictures.py"),
        (r"\bhttpx\.(AsyncClient|Client|get|post|request|stream)\(", "rewards/remote/client.py"),
    ],
)
def test_pictures_and_answers_come_in_at_one_place_with_its_bounds(call: str, place: str) -> None:
    found = [path for path in SOURCES if re.search(call, path.read_text(encoding="utf-8"))]
    assert [str(path.relative_to(ROOT)) for path in found] == [place]


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=is_safe)",
        "import pickle\npickle.load(file)",
        "from pickle import loads",
        "numpy.load(path, allow_pickle=True)",
        "eval(text)",
        "os.system(f'open {path}')",
        "subprocess.run(command, shell=True)",
        "yaml.load(text, Loader)",
        "AutoModel.from_pretrained(name)",
        "AutoProcessor.from_pretrained(name, trust_remote_code=True)",
        "GlmImagePipeline.from_pretrained(path, trust_remote_code=trust)",
        "Environment(autoescape=False)",
        "HTTPServer(('0.0.0.0', 80), Handler)",
    ],
)
def test_the_search_finds_each_danger(source: str) -> None:
    assert list(find_dangers(source))


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path, weights_only=True)",
        "import pickle\ntry: pass\nexcept pickle.UnpicklingError: pass",
        "model.eval()",
        "subprocess.run([program, path], check=True)",
        "AutoProcessor.from_pretrained(name, trust_remote_code=False)",
    ],
)
def test_the_search_passes_over_what_is_no_danger(source: str) -> None:
    assert list(find_dangers(source)) == []


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
