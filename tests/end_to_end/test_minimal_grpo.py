"""The example in one file does what the trainer does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from glm_grpo.config import compose_config
from glm_grpo.config.losses import ClippedLoss
from glm_grpo.grpo import losses as product_losses
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics

ROOT = Path(__file__).resolve().parents[2]

SIZES = ("rollout.prompts_per_step=2", "rollout.group_size=4", "train.micro_batch_size=3")


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("minimal_grpo", ROOT / "examples/minimal_grpo.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_loss_and_gradient_are_those_of_the_trainer(example):
    generator = torch.Generator().manual_seed(0)
    old, reference, new = (
        -torch.rand(4, 6, generator=generator).mul(3).requires_grad_(index == 2)
        for index in range(3)
    )
    advantages = torch.tensor([1.5, -0.5, 0.0, -1.0])
    settings = ClippedLoss(
        clip_low=example.CLIP,
        clip_high=example.CLIP,
        kl_coef=example.KL_COEF,
        kl_estimator="k3_corrected",
        kl_behaviour_coef=0.0,
        kl_placement="loss",
    )

    wanted = product_losses.grpo_loss(
        product_losses.LossInputs(new, old, reference, advantages[:, None]), settings
    )
    (wanted_gradient,) = torch.autograd.grad(wanted.total, new)
    loss, kl = example.grpo_loss(new, old, reference, advantages)
    (gradient,) = torch.autograd.grad(loss, new)

    assert wanted.metrics["ratio/clip_fraction"].any()
    torch.testing.assert_close(loss, wanted.total)
    torch.testing.assert_close(kl, wanted.metrics["kl/reference"])
    torch.testing.assert_close(gradient, wanted_gradient)


def test_steps_are_those_of_the_trainer(example, make_trainer, monkeypatch, capsys):
    overrides = (
        *SIZES,
        f"loss.clip_low={example.CLIP}",
        f"loss.clip_high={example.CLIP}",
        f"loss.kl_coef={example.KL_COEF}",
        f"advantage.std_floor={example.STD_FLOOR}",
        *("advantage.clip=null", "advantage.credit=image"),
        f"optim.learning_rate={example.LEARNING_RATE}",
        "optim.betas=[0.9,0.999]",
        "train.steps=2",
    )
    trainer, _, run_dir = make_trainer(*overrides)
    trainer.run()
    wanted = [row for row in read_metrics(RunFolder(run_dir)) if row["step"] > 0]

    monkeypatch.setattr(example, "ROWS", 3)
    small = ("decode.steps=2", "rollout.height=64", "rollout.width=64")
    results = example.train(compose_config(ROOT / "configs", "tiny", [*SIZES, *small]), steps=2)

    assert len(results) == len(wanted) == 2
    for result, metrics in zip(results, wanted, strict=True):
        assert result.reward == pytest.approx(metrics["reward/mean"], abs=1e-6)
        assert result.loss == pytest.approx(metrics["loss/total"], abs=1e-6)
        assert result.kl == pytest.approx(metrics["kl/reference"], abs=1e-6)
        assert result.grad_norm == pytest.approx(metrics["optim/grad_norm"], rel=1e-4)
    assert results[1].kl > 0
    assert capsys.readouterr().out.count("\n") == 2


def test_command_line_takes_config_keys(example, monkeypatch):
    taken = {}
    monkeypatch.setattr(example, "train", lambda config, steps: taken.update({steps: config}))

    example.main(["--steps", "3", "rollout.group_size=4"])

    assert taken[3].rollout.group_size == 4
