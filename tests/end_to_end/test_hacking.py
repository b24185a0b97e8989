"""A reward that can be gamed trips the canaries."""

from __future__ import annotations

import pytest

from glm_grpo.errors import HackingError
from glm_grpo.run.checkpoints import load_checkpoint, newest_checkpoint
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import evaluation_steps, read_metrics
from tests.end_to_end.runs import Brightness

GAMING = (
    "rollout.prompts_per_step=4",
    "rollout.group_size=8",
    "train.micro_batch_size=32",
    "train.steps=30",
    "loss.kl_coef=0",
    "optim.learning_rate=2e-3",
)


def test_loop_stops_and_saves_when_the_reward_is_gamed(make_trainer):
    trainer, _, run_dir = make_trainer(
        *GAMING, "reward.on_hacking=stop", term=Brightness(), held_out=16
    )

    with pytest.raises(HackingError, match=r"band of the untrained model.*on_hacking=warn"):
        trainer.run()

    folder = RunFolder(run_dir)
    rows = read_metrics(folder)
    assert [row["canary/departures"] > 0 for row in rows[1:]] == [False] * (len(rows) - 2) + [True]
    # It paid: this is a reward that a policy can please.
    assert rows[-1]["reward/mean"] > rows[1]["reward/mean"]
    # Everything is saved, and can be looked at.
    assert load_checkpoint(newest_checkpoint(folder)).step == rows[-1]["step"]
    assert evaluation_steps(folder) == [0]
    assert folder.gallery_path.exists()
