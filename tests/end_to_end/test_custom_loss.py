"""A run with the loss that docs/configuration.md shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from glm_grpo.errors import ConfigError
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics
from tests.end_to_end.runs import Brightness

VARYING = """\
from glm_grpo.grpo.losses import LossOutput

calls = []


def loss(inputs):
    calls.append(1)
    total = -(inputs.advantages[:, None] * inputs.log_probs).mean()
    return LossOutput(total, {"mine/first": total.detach()} if len(calls) == 1 else {})
"""
DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_metrics_of_a_custom_loss_are_stored(make_trainer, tmp_path, monkeypatch):
    code = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)[1]
    (tmp_path / "documented.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    trainer, models, run_dir = make_trainer(
        "loss=custom",
        "loss.function=documented:reinforce",
        "train.steps=1",
        term=Brightness(),
    )
    before = {name: value.clone() for name, value in models.policy.state_tensors().items()}

    trainer.run()

    row = read_metrics(RunFolder(run_dir))[-1]
    assert row["mine/token_loss"] == pytest.approx(row["loss/policy"], abs=1e-6)
    assert "ratio/mean" not in row
    assert any(
        not value.equal(before[name]) for name, value in models.policy.state_tensors().items()
    )


def test_metrics_that_only_some_calls_report_are_refused(make_trainer, tmp_path, monkeypatch):
    (tmp_path / "varying.py").write_text(VARYING)
    monkeypatch.chdir(tmp_path)
    trainer, _, _ = make_trainer(
        *("loss=custom", "loss.function=varying:loss"),
        *("train.steps=1", "train.micro_batch_size=4"),
        term=Brightness(),
    )

    with pytest.raises(ConfigError, match="metric 'mine/first' was not reported by every call"):
        trainer.run()
