"""Runs of the real loop on the embedded model, small enough for a test."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from accelerate import Accelerator
from rich.console import Console

from glm_grpo.build import Launch, Prompts, build_models, build_prompts, build_trainer
from glm_grpo.config import compose_config
from glm_grpo.training.checkpoint.resume import open_run
from glm_grpo.training.distributed.processes import Processes

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
        if change_stage is not None:
            models = change_stage(models)
        launch = Launch(Accelerator(), Processes())
        trainer = build_trainer(
            config, models, prompts, open_run(config), launch, Console(quiet=True)
        )
        if change_batch is not None:
            trainer.source.batch_for_step = change_batch(trainer.source.batch_for_step)
        return trainer, models, run_dir

    return build
