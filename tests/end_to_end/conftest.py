"""Runs of the real loop on the embedded model, small enough for a test."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from rich.console import Console

from glm_grpo.builders.models import begin_with, build_models, find_start
from glm_grpo.builders.prompts import Prompts, build_prompts
from glm_grpo.builders.trainer import Launch, build_trainer
from glm_grpo.config import compose_config
from glm_grpo.models.glm_image.policy import GlmImagePolicy
from glm_grpo.run.folder import RunFolder
from glm_grpo.training.checkpoint.resume import open_run, pin_start
from glm_grpo.training.distributed.processes import Processes
from rewards.score import Scorer, Term
from tests.cached_rollouts import cached_sampling

CONFIG_DIR = Path(__file__).parents[2] / "configs"

SMALL = (
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "train.micro_batch_size=16",
    "train.eval_every=1000",
    "train.checkpoint_every=1000",
    "optim.warmup_steps=0",
    "optim.schedule=constant",
    "trackers=[]",
)

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
    # Terms are replaced by one of the test's.
    "~reward.terms.lpips",
    "~reward.terms.ocr",
    "~reward.terms.aesthetic",
)


@pytest.fixture
def cached_rollouts(tmp_path_factory, monkeypatch):
    """Runs read what an earlier one sampled of the same weights and prompts."""
    folder = tmp_path_factory.getbasetemp() / "rollouts"
    monkeypatch.setattr(GlmImagePolicy, "sample", cached_sampling(folder))


@pytest.fixture
def make_trainer(tmp_path):
    """Builds a run on the embedded model from tiny.yaml and overrides.

    `change_stage` and `change_batch` stand between building and running; `held_out` is the number
    of held-out prompts that are kept.
    """

    def build(*overrides, folder="run", change_stage=None, change_batch=None, held_out=4):
        run_dir = tmp_path / folder
        config = compose_config(CONFIG_DIR, "tiny", [*SMALL, f"run_dir={run_dir}", *overrides])
        prompts = build_prompts(config)
        short = dataclasses.replace(prompts.held_out, signs=prompts.held_out.signs[:held_out])
        prompts = Prompts(training=prompts.training, held_out=short)
        models = build_models(config, Accelerator().device, needs_reference=True)
        opened = open_run(config)
        config = pin_start(config, opened.checkpoint)
        begin_with(models, find_start(config))
        if change_stage is not None:
            models = change_stage(models)
        launch = Launch(Accelerator(), Processes())
        trainer = build_trainer(config, models, prompts, opened, launch, Console(quiet=True))
        if change_batch is not None:
            trainer.source.batch_for_step = change_batch(trainer.source.batch_for_step)
        return trainer, models, run_dir

    return build


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
        config = compose_config(CONFIG_DIR, "tiny", [*SMALL_RUN, *paths, *overrides])
        accelerator = Accelerator()
        models = build_models(config, accelerator.device, needs_reference=True)
        models = dataclasses.replace(
            models, scorer=Scorer([Term("brightness", term or Brightness(), weight)])
        )
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


class Payload:
    """Unpickled, it makes a file: what ran once could have done anything."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.trace,))

    @property
    def was_run(self) -> bool:
        return self.trace.exists()

    def as_code(self) -> str:
        """A module that does the same on import."""
        return f"from pathlib import Path\nPath({str(self.trace)!r}).touch()\n"


@pytest.fixture
def payload(tmp_path: Path) -> Payload:
    return Payload(tmp_path / "payload-was-run")
