"""Start and the tutorials, run block by block as a reader would, with fewer and smaller images.

Commands on the published model, and runs that a page never comes back to, are composed by
`test_commands.py` alone.
"""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

import glm_grpo.cli
import glm_grpo.config
from examples import minimal_grpo
from glm_grpo.commands import init
from glm_grpo.commands.train import run_training
from glm_grpo.config import Config, compose_config
from glm_grpo.setup.prepared_run import prepare
from glm_grpo.tiny import prompts as tiny_prompts
from tests.site.pages import PAGES, ROOT, WrittenFile, blocks, shell

PUBLISHED = "docs/tutorials/glm_image.md"
"""The page on the published model, whose commands need its weights."""

RUN = [
    page
    for page in PAGES
    if page.startswith(("README", "docs/start", "docs/tutorials")) and page != PUBLISHED
]
SHORT = ("docs/start.md",)
"""Pages that every `make test` runs; the others have commands that other tests run too."""

FEWER = (
    "train.steps=1",
    "rollout.prompts_per_step=1",
    "rollout.group_size=2",
    "eval.samples_per_prompt=1",
    "decode.steps=1",
    "trackers=[]",
)

MOST_OF_A_SWEEP = 2
_FILE = re.compile(r"# (\w+\.py)\b")


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of a reader's own, in which runs are small and few prompts are shipped."""
    for name, (words, seed) in tiny_prompts._SETS.items():
        monkeypatch.setitem(tiny_prompts._SETS, name, (words[:3], seed))
    for file in init._COUNTS:
        monkeypatch.setitem(init._COUNTS, file, 2)
    monkeypatch.setattr(glm_grpo.config, "compose_config", compose_small)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    modules = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def compose_small(
    config_dir: Path, name: str, overrides: Sequence[str] = (), **options: Any
) -> Config:
    """As it is written, but for the number and the care of images."""
    return compose_config(config_dir, name, [*overrides, *FEWER], **options)


def train(words: list[str]) -> None:
    """What stands behind `train.py`, a sweep's first runs one after another."""
    options = argparse.ArgumentParser()
    options.add_argument("--config-dir", type=Path)
    options.add_argument("--config-name")
    options.add_argument("-m", action="store_true")
    options.add_argument("overrides", nargs="*")
    given = options.parse_args(words)
    folder = given.config_dir or ROOT / "configs"
    name = given.config_name or ("config" if given.config_dir else "tiny")
    for overrides in sweep(given.overrides) if given.m else [given.overrides]:
        run_training(compose_small(folder, name, overrides))


def sweep(overrides: list[str]) -> list[list[str]]:
    """The overrides of its first runs, each with the folder that Hydra would give it."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    folder = next(each.value() for each in parsed if each.key_or_group == "hydra.sweep.dir")
    Path(folder).mkdir(parents=True)
    (Path(folder) / "multirun.yaml").touch()
    runs = []
    for number in range(MOST_OF_A_SWEEP):
        words = [f"run_dir={folder}/{number}"]
        for each in parsed:
            if each.is_sweep_override():
                values = [*each.sweep_string_iterator()]
                words.append(f"{each.key_or_group}={values[number % len(values)]}")
            elif each.key_or_group != "hydra.sweep.dir":
                words.append(str(each.input_line))
        runs.append(words)
    return runs


def run_python(words: list[str]) -> None:
    if words[0] == "train.py":
        train(words[1:])
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", words)
            runpy.run_path(words[0], run_name="__main__")


def run_command(words: list[str]) -> None:
    if words[0] == "train":
        train(words[1:])
    else:
        glm_grpo.cli.main(words)


RUNNERS: dict[str, Callable[[list[str]], None]] = {"python": run_python, "glm-grpo": run_command}


def is_of_published_model(words: Sequence[str]) -> bool:
    return any(word.startswith(("glm_image", "glm-run", "janus")) for word in words)


def is_looked_at(words: Sequence[str], page: str) -> bool:
    """Whether a page comes back to what a command writes; if not, its words alone are tested."""
    folders = [word.partition("=")[2] for word in words if re.match(r"run_dir=|hydra\.sweep", word)]
    return all((ROOT / page).read_text().count(folder) > 1 for folder in folders)


def run_shell(text: str, page: str) -> None:
    for step in shell(text):
        if isinstance(step, WrittenFile):
            Path(step.name).write_text(step.text)
        elif (
            step.name in RUNNERS
            and not is_of_published_model(step.words)
            and is_looked_at(step.words, page)
        ):
            RUNNERS[step.name](list(step.words[1:]))


def run_python_block(text: str) -> None:
    file = _FILE.match(text)
    if file is not None:
        Path(file[1]).write_text(text)
        return
    names = names_of_the_example() if text.startswith("for step") else {}
    exec(compile(text, "page", "exec"), names)


def names_of_the_example() -> dict[str, object]:
    """What the loop of the README is written in: the names of `examples/minimal_grpo.py`."""
    config = compose_small(ROOT / "configs", "tiny")
    models = prepare(config).load()
    policy = models.policy
    return vars(minimal_grpo) | {
        "steps": 1,
        "config": config,
        "prompts": prepare(config).prompts.training,
        "policy": policy,
        "decoder": models.decoder,
        "scorer": models.scorer,
        "optimizer": torch.optim.AdamW(policy.trainable_parameters(), lr=1e-4),
    }


@pytest.mark.parametrize(
    "page",
    [page if page in SHORT else pytest.param(page, marks=pytest.mark.long) for page in RUN],
)
@pytest.mark.usefixtures("reader")
def test_page_runs_from_top_to_bottom(page: str, request: pytest.FixtureRequest) -> None:
    if page in SHORT:
        request.getfixturevalue("small_preview")
    for block in blocks(page):
        if block.language == "bash":
            run_shell(block.text, page)
        elif block.language == "python":
            run_python_block(block.text)
