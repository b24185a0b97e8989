"""A reward that can be gamed trips the canaries; the one of the mission does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from glm_grpo.errors import HackingError
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import evaluation_steps, read_metrics
from glm_grpo.training.checkpoint.files import load_checkpoint, newest_checkpoint
from glm_grpo.training.monitors.hacking import HackingMonitor
from rewards.score import Scorer, Term

pytestmark = pytest.mark.usefixtures("cached_rollouts")

GAMING = (
    "rollout.prompts_per_step=4",
    "rollout.group_size=8",
    "train.micro_batch_size=32",
    "train.steps=30",
    "loss.kl_coef=0",
    "optim.learning_rate=1e-3",
)


BRIGHTNESS_ALONE = (
    *(f"~reward.terms.{name}" for name in ("lpips", "ocr", "aesthetic")),
    "reward.terms.ssim.weight=0",
    "+reward.terms.ssim.when=evaluation",
    "+reward.terms.brightness.kind=custom",
    "+reward.terms.brightness.function=benchmarks.brightness:brightness",
    "+reward.terms.brightness.weight=1",
    "reward.allow_untied=true",
)


class Brightness:
    """Pays for bright pictures, whatever the prompt."""

    def applies_to(self, prompt):
        return True

    def score(self, prompts, pixels):
        return pixels.float().mean(dim=(1, 2, 3)) / 255

    def modules(self):
        return ()


def pay_for_brightness(models):
    return replace(models, scorer=Scorer([Term("brightness", Brightness(), 1.0)]))


def test_loop_stops_and_saves_when_the_reward_is_gamed(make_trainer):
    trainer, _, run_dir = make_trainer(
        *GAMING, "reward.on_hacking=stop", change_stage=pay_for_brightness, held_out=16
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


def test_loop_stops_when_a_term_of_evaluations_falls(make_trainer, monkeypatch):
    # The canaries of the steps sleep: at this rate they would come first.
    measure = HackingMonitor.measure
    monkeypatch.setattr(
        HackingMonitor, "measure", lambda *given: replace(measure(*given), departures=())
    )
    trainer, _, run_dir = make_trainer(
        *GAMING, *BRIGHTNESS_ALONE, "train.eval_every=4", "reward.on_hacking=stop", held_out=16
    )

    with pytest.raises(HackingError, match=r"ssim 0\.\d+ is below 0\.\d+\.\.inf"):
        trainer.run()

    rows = read_metrics(RunFolder(run_dir))
    assert rows[-1]["step"] % 4 == 0
    assert rows[-1]["canary/ssim"] == pytest.approx(rows[-1]["eval/ssim"])
    assert rows[-1]["canary/departures"] >= 1
    assert load_checkpoint(newest_checkpoint(RunFolder(run_dir))).step == rows[-1]["step"]
