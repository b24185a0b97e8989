"""A loss of the user's own: found by name, weighted and reported as the shipped ones are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from glm_grpo.config.losses import CustomLoss
from glm_grpo.errors import ConfigError
from glm_grpo.grpo.losses import LossInputs, grpo_loss
from tests.factories import changed
from tests.grpo.table_policy import (
    ADVANTAGES,
    SETTINGS,
    TablePolicy,
    learn,
    make_experience,
    make_logits,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"

MODULE = """
from dataclasses import replace

import torch

from glm_grpo.grpo.losses import LossOutput

def reinforce(inputs):
    tokens = -inputs.log_probs * inputs.advantages
    metrics = {"mine/advantage": inputs.advantages.mean(), "mine/token": tokens}
    return LossOutput(tokens.mean(), metrics)

def number(inputs):
    return 3.0

def tokens(inputs):
    return LossOutput(-inputs.log_probs, {})

def same_names(inputs):
    output = reinforce(inputs)
    hidden = ("loss/total", "loss/policy", "optim/grad_norm", "optim/learning_rate")
    return LossOutput(output.total, {name: torch.tensor(-9.0) for name in hidden})

def varying(inputs):
    calls.append(1)
    metrics = {"mine/first": torch.tensor(1.0)} if len(calls) == 1 else {}
    return replace(reinforce(inputs), metrics=metrics)

def careless(inputs):
    torch.set_default_dtype(torch.float16)
    torch.set_grad_enabled(False)
    return reinforce(inputs)

calls = []

def constant(inputs):
    return LossOutput(inputs.advantages.mean(), {})
"""


def custom(function: str, **changes: object) -> CustomLoss:
    start = {"kl_coef": 0.0, "kl_estimator": "k3", "kl_placement": "loss", "kl_behaviour_coef": 0.0}
    return CustomLoss(kind="custom", function=function, **start | changes)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_losses.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return "my_losses"


@pytest.fixture
def inputs() -> LossInputs:
    log_probs = torch.tensor([[-1.0, -2.0], [-0.5, -0.25]], requires_grad=True)
    return LossInputs(
        log_probs, log_probs.detach(), log_probs.detach() - 1, torch.tensor([[2.0], [-4.0]])
    )


def test_custom_loss_is_what_its_function_says(module: str, inputs: LossInputs) -> None:
    loss = grpo_loss(inputs, custom(f"{module}:reinforce"))
    # (2 * 1 + 2 * 2 - 4 * 0.5 - 4 * 0.25) / 4.
    assert loss.total.item() == pytest.approx(0.75)
    assert loss.terms["loss/policy"].item() == pytest.approx(0.75)
    assert loss.metrics["mine/advantage"].item() == -1
    assert loss.metrics["mine/token"].tolist() == [[2.0, 4.0], [-2.0, -1.0]]
    assert not loss.metrics["mine/token"].requires_grad
    (gradient,) = torch.autograd.grad(loss.total, inputs.log_probs)
    assert gradient.tolist() == [[-0.5, -0.5], [1.0, 1.0]]


@pytest.mark.usefixtures("own_defaults")
def test_what_a_custom_loss_changes_for_the_whole_process_is_undone(
    module: str, inputs: LossInputs, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="without gradient"):
        grpo_loss(inputs, custom(f"{module}:careless"))
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert re.search(rf"{module}:careless .*torch\.get_default_dtype\(\)", caplog.text)


def test_kl_terms_are_added_to_a_custom_loss(module: str, inputs: LossInputs) -> None:
    loss = grpo_loss(inputs, custom(f"{module}:reinforce", kl_coef=0.5, kl_estimator="k2"))
    # The reference is 1 below everywhere: k2 = 1 / 2.
    assert loss.terms["loss/kl"].item() == pytest.approx(0.25)
    assert loss.total.item() == pytest.approx(1.0)


def test_metrics_of_a_custom_loss_hide_none_of_the_update(module: str) -> None:
    logits = make_logits()
    experience = make_experience(logits, ADVANTAGES)
    reports = [
        learn(TablePolicy(logits), experience, SETTINGS._replace(loss=custom(f"{module}:{name}")))
        for name in ("reinforce", "same_names")
    ]
    expected = -(experience.rollout.log_probs * ADVANTAGES[..., None]).mean().item()
    for (report,) in reports:
        assert report.loss == pytest.approx(expected, rel=1e-5)
        assert report.metrics["loss/total"] == report.loss
        assert report.metrics["loss/policy"] == pytest.approx(report.loss)
        assert report.metrics["optim/grad_norm"] == report.grad_norm > 0
        assert report.metrics["optim/learning_rate"] == 0.1


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("number", "float"),
        ("tokens", r"total of shape \(2, 2\)"),
        ("constant", "gradient"),
    ],
)
def test_custom_loss_that_returns_no_loss_is_refused(
    module: str, inputs: LossInputs, name: str, found: str
) -> None:
    with pytest.raises(ConfigError, match=f"loss.function = {module}:{name}: .*{found}"):
        grpo_loss(inputs, custom(f"{module}:{name}"))


@pytest.mark.parametrize(
    ("function", "problem"),
    [("not_there:loss", "cannot be imported"), ("my_losses:reinforced", "did you mean reinforce")],
)
def test_custom_loss_that_is_not_there_is_refused(module: str, function: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"loss.function = {function}: .*{problem}"):
        custom(function).load()


def test_metrics_that_only_some_calls_report_are_refused(module: str) -> None:
    logits = make_logits()
    settings = changed(SETTINGS, micro_batch_size=2)._replace(loss=custom(f"{module}:varying"))
    with pytest.raises(ConfigError, match="mine/first"):
        learn(TablePolicy(logits), make_experience(logits, ADVANTAGES), settings)


def test_the_loss_that_the_documentation_shows_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    assert code is not None
    (tmp_path / "documented.py").write_text(code[1])
    monkeypatch.chdir(tmp_path)
    logits = make_logits()
    policy = TablePolicy(logits)
    settings = SETTINGS._replace(loss=custom("documented:reinforce"))
    (report,) = learn(policy, make_experience(logits, ADVANTAGES), settings)
    policy_loss = report.metrics["loss/policy"]
    assert report.metrics["mine/token_loss"] == pytest.approx(policy_loss, abs=1e-6)
    assert "ratio/mean" not in report.metrics
    assert not policy.logits.equal(logits)
