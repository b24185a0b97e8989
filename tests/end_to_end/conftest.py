"""Runs of the real loop on the embedded model, small enough for a test."""

from __future__ import annotations

import copy
import dataclasses
import functools
from pathlib import Path

import pytest
from rich.console import Console

from glm_grpo.config import compose_config
from glm_grpo.models.glm_image import loading
from glm_grpo.run.lock import RunLock
from glm_grpo.run.resume import find_resumed, make_run_folder
from glm_grpo.setup.prepared_run import prepare
from glm_grpo.setup.prompts import Prompts
from glm_grpo.setup.trainer import build_trainer
from glm_grpo.studio.gallery import refresh_gallery
from glm_grpo.tiny import prompts as tiny_prompts
from glm_grpo.tiny import world
from tests.end_to_end.runs import pay_for

CONFIG_DIR = Path(__file__).parents[2] / "configs"

SMALL = (
    "rollout.prompts_per_step=2",
    "rollout.group_size=4",
    "rollout.height=64",
    "rollout.width=64",
    "decode.steps=2",
    "eval.samples_per_prompt=1",
    "train.micro_batch_size=8",
    "train.eval_every=1000",
    "train.checkpoint_every=1000",
    "optim.warmup_steps=0",
    "optim.schedule=constant",
    "trackers=[]",
)

ONE_TERM = ("~reward.terms.lpips", "~reward.terms.ocr", "~reward.terms.aesthetic")
"""Little to load, where the test replaces the reward by its own (`runs.pay_for`)."""


@pytest.fixture(scope="session")
def load_pipeline():
    """As the product's, but files are read once."""
    cached = functools.cache(loading.load_pipeline)
    return lambda *path, **options: copy.deepcopy(cached(*path, **options))


@pytest.fixture(scope="session")
def check_model():
    """As the product's, but files are checked once."""
    return functools.cache(loading.check_model)


@pytest.fixture
def small(small_preview, load_pipeline, check_model, monkeypatch):
    """Makes runs quick: a small preview, a model that is copied instead of loaded."""
    monkeypatch.setattr("glm_grpo.models.glm_image.family.load_pipeline", load_pipeline)
    monkeypatch.setattr("glm_grpo.models.glm_image.family.check_model", check_model)


@pytest.fixture
def half_size(monkeypatch):
    """Makes the embedded world's images 64 pixels wide: a quarter of the tokens and pixels."""
    draw_sign = world.draw_sign
    small = functools.partial(tiny_prompts.WorldPrompts, height=64, width=64)
    monkeypatch.setattr(tiny_prompts, "WorldPrompts", small)
    monkeypatch.setattr(world, "SIZE", 64)
    monkeypatch.setattr(world, "draw_sign", lambda sign: draw_sign(sign)[:, ::2, ::2].clone())


@pytest.fixture
def make_trainer(tmp_path, small, half_size, monkeypatch):
    """Builds a run on the embedded model from tiny.yaml and overrides, with a small preview.

    `term` replaces the reward; `change_stage` and `change_step` stand between building and
    running; `held_out` is the number of held-out prompts that are kept, None for all; `work` is
    what the models count as done.
    """

    def build(
        *overrides,
        folder="run",
        term=None,
        change_stage=None,
        change_step=None,
        held_out=2,
        work=None,
    ):
        run_dir = tmp_path / folder
        terms = () if term is None else ONE_TERM
        settings = (*SMALL, *terms, f"run_dir={run_dir}", *overrides)
        config = compose_config(CONFIG_DIR, "tiny", settings)
        if term is not None:
            # Of a reward that is replaced.
            for check in ("check_used", "check_rows"):
                monkeypatch.setattr(f"glm_grpo.setup.prepared_run.{check}", lambda *_: None)
        lock = RunLock()
        resumed = find_resumed(config, lock)
        prepared = prepare(config, resumed=resumed)
        if held_out is not None:
            prompts = prepared.prompts
            short = dataclasses.replace(prompts.held_out, signs=prompts.held_out.signs[:held_out])
            prepared = dataclasses.replace(
                prepared, prompts=Prompts(training=prompts.training, held_out=short)
            )
        models = prepared.load()
        if term is not None:
            models = pay_for(term)(models)
        if change_stage is not None:
            models = change_stage(models)
        if work is not None:
            monkeypatch.setattr("glm_grpo.setup.trainer.work_of_run", lambda *_: work)
        trainer = build_trainer(
            prepared,
            models,
            make_run_folder(config, lock) if resumed is None else resumed.folder,
            Console(quiet=True),
            show=refresh_gallery,
        )
        if change_step is not None:
            trainer.step.take = change_step(trainer.step.take)
        return trainer, models, run_dir

    return build
