"""The loop learns what it is paid for."""

from __future__ import annotations

import pytest

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics
from tests.end_to_end.runs import pay_for
from tests.factories import Brightness


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_loop_learns_and_follows_the_sign_of_the_reward(make_trainer, tmp_path, sign):
    data = tmp_path / "prompts.txt"
    data.write_text("a red circle\na blue square\n")
    trainer, _, run_dir = make_trainer(
        *("rollout.group_size=8", "rollout.temperature=2", "train.steps=6", "decode.steps=1"),
        *("rollout.height=32", "rollout.width=32", "train.micro_batch_size=16"),
        *("optim.learning_rate=1e-3", "loss.kl_coef=0"),
        *(f"data.path={data}", f"data.eval_path={data}"),
        term=Brightness(),
        held_out=None,
        change_stage=pay_for(Brightness(), sign),
    )
    trainer.run()

    _, first, *_, last = read_metrics(RunFolder(run_dir))
    change = last["reward/brightness/mean"] - first["reward/brightness/mean"]
    assert sign * change > 0.1
