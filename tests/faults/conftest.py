"""What tests of more than one file of this folder use."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from accelerate import Accelerator
from rich.console import Console

from glm_grpo.build import Launch, build_models, build_prompts, build_trainer
from glm_grpo.config import compose_config
from glm_grpo.run.folder import RunFolder
from glm_grpo.training.checkpoint.resume import open_run
from glm_grpo.training.distributed.processes import Processes
from rewards.score import Scorer, Term

CONFIGS = Path(__file__).parents[2] / "configs"

# Three seconds a step on two cores.
SMALL_RUN = (
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.height=32",
    "rollout.width=32",
    "train.steps=4",
    "train.micro_batch_size=2",
    "train.eval_every=1000",
    "train.checkpoint_every=1",
    "train.keep_checkpoints=9",
    "eval.samples_per_prompt=1",
    "optim.warmup_steps=0",
    "optim.schedule=constant",
    "trackers=[]",
)

PROCESS = Path("/proc/self")


def status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", (PROCESS / "status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@pytest.fixture
def peak_memory() -> Callable[[Callable[[], object]], int]:
    """Runs an action and returns by how many bytes the process grew at the worst moment of it."""
    if not os.access(PROCESS / "clear_refs", os.W_OK):
        pytest.skip("the system does not tell the peak of a process's memory")

    def measure(action: Callable[[], object]) -> int:
        gc.collect()
        # What was freed and kept for later use would hide as much of the growth.
        ctypes.CDLL(None).malloc_trim(0)
        (PROCESS / "clear_refs").write_text("5")
        before = status_bytes("VmRSS")
        action()
        return status_bytes("VmHWM") - before

    return measure


class Brightness:
    """Scores by brightness; `change` is given the scores of each group and its prompt."""

    def __init__(self, change=lambda scores, prompt: scores):
        self._change = change

    def applies_to(self, prompt):
        return True

    def score(self, prompts, pixels):
        return self._change(pixels.float().mean(dim=(1, 2, 3)) / 255, prompts[0])

    def modules(self):
        return ()


@pytest.fixture
def brightness():
    """`Brightness`, as a fixture: test folders are no packages."""
    return Brightness


@pytest.fixture
def make_run(tmp_path):
    """Builds a run of the real loop on one term.

    `at_step` is called with the stage and the number of each step before it begins. Another run of
    the same folder goes on with it.
    """
    data = tmp_path / "prompts.txt"
    data.write_text("a red circle\na blue square\n")

    def build(*overrides, term=None, weight=1.0, at_step=lambda models, step: None, folder="run"):
        paths = (f"data.path={data}", f"data.eval_path={data}", f"run_dir={tmp_path / folder}")
        config = compose_config(CONFIGS, "tiny", [*SMALL_RUN, *paths, *overrides])
        accelerator = Accelerator()
        models = build_models(config, accelerator.device, needs_reference=True)
        models = replace(models, scorer=Scorer([Term("brightness", term or Brightness(), weight)]))
        trainer = build_trainer(
            config,
            models,
            build_prompts(config),
            open_run(config),
            Launch(accelerator, Processes()),
            Console(quiet=True),
        )
        batch_for_step = trainer.source.batch_for_step

        def announced(at):
            at_step(models, at + 1)
            return batch_for_step(at)

        trainer.source.batch_for_step = announced
        return trainer, models, RunFolder(tmp_path / folder)

    return build
