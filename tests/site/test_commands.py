"""Every command that the README and docs/ show is one that the programs accept."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from glm_grpo.cli import make_parser
from glm_grpo.config import Config, compose_config, validate_config
from glm_grpo.data.files import JSON_FIELDS, READ_FIELDS
from glm_grpo.models.export_page import PROGRAM
from rewards.terms.composition_rows import read_composition
from tests.site.pages import PAGES, ROOT, Command, blocks, shell

FOREIGN = {
    "hf",
    "curl",
    "git",
    "ssh",
    "export",
    "ln",
    "mkdir",
    "pip",
    "tensorboard",
    "wandb",
    ".",
}
"""Programs that are not ours: only their names are looked at."""


OF_OTHERS = ("scorer-env/", "vllm-env/")
"""Environments of their own for other programs."""


def first_of_sweep(overrides: list[str]) -> list[str]:
    """With the first value of each key of a sweep."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    return [
        f"{each.key_or_group}={next(each.sweep_string_iterator())}"
        if each.is_sweep_override()
        else str(each.input_line)
        for each in parsed
    ]


@cache
def composed(name: str, overrides: tuple[str, ...]) -> Config:
    """Pages repeat each other's commands."""
    return compose_config(ROOT / "configs", name, overrides)


def train_config(words: list[str]) -> Config:
    """Composes what is written behind `train.py`."""
    options = argparse.ArgumentParser()
    options.add_argument("--config-name", default="tiny")
    options.add_argument("--config-dir")
    options.add_argument("--cfg", choices=("job",))
    options.add_argument("-m", action="store_true")
    options.add_argument("overrides", nargs="*")
    given = options.parse_args(words)
    overrides = first_of_sweep(given.overrides) if given.m else given.overrides
    return composed(given.config_name, tuple(overrides))


def accept_python(words: list[str]) -> None:
    if words[0] == "train.py":
        train_config(words[1:])
    elif words[0] == "-m":
        assert words[1] == "venv" or importlib.util.find_spec(words[1]), words
    else:
        # `scorer.py` and its like are blocks of the page itself; an export has its program.
        path = Path(words[0])
        is_written = path.parent == Path() or path.name == PROGRAM
        assert (ROOT / path).exists() or is_written, words


def accept_accelerate(words: list[str]) -> None:
    if "--config_file" in words:
        assert (ROOT / words[words.index("--config_file") + 1]).exists()
    train_config(words[words.index("train.py" if "train.py" in words else "train") + 1 :])


def accept_sbatch(words: list[str]) -> None:
    assert (ROOT / words[0]).exists()
    train_config(words[1:])


def accept_glm_grpo(words: list[str]) -> None:
    if words[0] == "train":
        train_config(words[1:])
        return
    commands = make_parser().get_default("commands")
    options = vars(commands[words[0]].parse_intermixed_args(words[1:]))
    if "overrides" in options and "config_name" in options:
        name = options["config_name"] or "tiny"
        # `init` writes prompts, `plan` reads none, and `eval` no training prompts.
        is_without = words[0] in ("init", "plan", "eval")
        paths = ("data.path=a", "data.eval_path=b") if is_without else ()
        composed(name, (*paths, *options["overrides"]))


def accept_make(words: list[str]) -> None:
    for target in words:
        assert f"\n{target}:" in (ROOT / "Makefile").read_text(), target


OURS: dict[str, Callable[[list[str]], None]] = {
    "python": accept_python,
    "python3": accept_python,
    "accelerate": accept_accelerate,
    "sbatch": accept_sbatch,
    "glm-grpo": accept_glm_grpo,
    "make": accept_make,
}


def accept_bash(text: str) -> None:
    for step in shell(text):
        if isinstance(step, Command) and step.name in OURS:
            OURS[step.name](list(step.words[1:]))
        elif isinstance(step, Command):
            assert step.name in FOREIGN or step.name.startswith(OF_OTHERS), step.words


def accept_yaml(text: str) -> None:
    """Keys and values are those of a config."""
    values = OmegaConf.create(text)
    values.pop("defaults", None)
    base = OmegaConf.create(train_config([]).model_dump(mode="json"))
    validate_config(OmegaConf.to_container(OmegaConf.merge(base, values)))


def accept_json(text: str) -> None:
    """One object a line, as in a file of prompts, or one object."""
    try:
        rows = [json.loads(line) for line in text.splitlines()]
    except json.JSONDecodeError:
        rows = [json.loads(text)]
    for row in rows:
        assert "prompt" not in row or {*row} <= {*READ_FIELDS, *JSON_FIELDS, "tag", "vqa_list"}
        read_composition(row)


def accept_python_code(text: str) -> None:
    compile(text, "page", "exec")


ACCEPT: dict[str, Callable[[str], None]] = {
    "bash": accept_bash,
    "json": accept_json,
    "python": accept_python_code,
    "yaml": accept_yaml,
}


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_accepted(page: str) -> None:
    for block in blocks(page):
        assert block.language not in ("", "sh", "shell"), f"say which language: {block.text[:80]}"
        if block.language in ACCEPT:
            ACCEPT[block.language](block.text)
