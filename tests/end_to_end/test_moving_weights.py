"""reward.combine=shares and at_least in runs: what is stored and scored again."""

from __future__ import annotations

import pyarrow.parquet
import pytest
import torch

from glm_grpo.rescoring.rescore import rescore
from glm_grpo.run.config import read_config
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.stored import read_rollouts
from glm_grpo.run.tables import read_metrics, read_weighing

RUN = (
    "rollout.prompts_per_step=2",
    "rollout.group_size=4",
    "train.steps=4",
    "train.eval_every=2",
    "train.checkpoint_every=1",
    "optim.learning_rate=1e-3",
    "rollout.temperature=2",
    "reward.combine=shares",
    "+reward.terms.aesthetic.at_least=1.5",
    "+reward.terms.lpips.share=0.6",
)


@pytest.fixture
def moving(make_trainer):
    trainer, _, run_dir = make_trainer(*RUN, folder="moving")
    trainer.run()
    return run_dir


def test_weights_move_by_the_rules_and_are_stored_with_each_step(moving):
    folder = RunFolder(moving)
    rows = read_metrics(folder)[1:]
    asked = {"lpips": 0.6, "ssim": 0.2, "ocr": 0.3, "aesthetic": 0.1}
    first, last = rows[0], rows[-1]
    for name, share in asked.items():
        assert first[f"reward/{name}/weight"] == pytest.approx(share / 1.2)
    assert first["reward/aesthetic/multiplier"] == 0
    # No picture scores 1.5: the multiplier grows, and the share asked for with it.
    multipliers = [row["reward/aesthetic/multiplier"] for row in rows]
    assert multipliers == sorted(set(multipliers))
    assert "reward/ocr/multiplier" not in first
    assert abs(first["reward/mean"]) < 1e-5
    for step, row in enumerate(rows, start=1):
        weighing = read_weighing(folder.rollout_path(step))
        for name in asked:
            assert weighing.weights[name] == pytest.approx(row[f"reward/{name}/weight"])
    assert last["reward/lpips/weight"] != pytest.approx(first["reward/lpips/weight"], rel=1e-3)
    # Evaluations have the shares asked for, in units of the untrained model.
    assert read_weighing(folder.evaluation_path(4)).weights == pytest.approx(asked)
    assert read_metrics(folder)[0]["eval/total"] == pytest.approx(0, abs=1e-6)

    assert_totals_follow(moving)
    assert_rescored_alike(moving)


def assert_totals_follow(moving):
    table = pyarrow.parquet.read_table(RunFolder(moving).rollout_path(4)).to_pydict()
    weighing = read_weighing(RunFolder(moving).rollout_path(4))
    for row, total in enumerate(table["total"]):
        parts = [
            weight * (table[f"raw/{name}"][row] - mean) / std
            for (name, weight), (mean, std) in zip(
                weighing.weights.items(), weighing.units.values(), strict=True
            )
        ]
        assert total == pytest.approx(sum(parts), abs=1e-4)
    totals = torch.tensor(table["total"]).reshape(2, 4)
    centred = totals - totals.mean(dim=1, keepdim=True)
    expected = centred / centred.std(dim=1, keepdim=True).clamp(min=0.02)
    found = torch.tensor(table["advantage"]).reshape(2, 4)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def assert_rescored_alike(moving):
    folder = RunFolder(moving)
    own = rescore(folder, ["reward.share_rate=0.3"])
    assert own.changed_winners == 0
    assert own.changes == ()
    config = read_config(folder)
    stored = read_rollouts(folder, tuple(config.reward.terms), group_size=4)
    assert own.groups == len(stored.groups.steps)
    # The shares that the steps reported, of groups that are not flat.
    rows = read_metrics(folder)[1:]
    varied = [2 * (1 - row["advantage/flat_fraction"]) for row in rows]
    for term in own.terms:
        shares = [row[f"reward/{term.name}/advantage_share"] for row in rows]
        mean = sum(s * n for s, n in zip(shares, varied, strict=True)) / sum(varied)
        assert term.share_before == pytest.approx(mean, abs=1e-4)
    other = rescore(folder, ["reward.terms.ocr.share=5"])
    assert other.terms[2].share_after > other.terms[2].share_before
    fixed = rescore(folder, ["reward.combine=weighted_sum"])
    assert [term.weight_after for term in fixed.terms] == pytest.approx([0.4, 0.2, 0.3, 0.1])
    bound = rescore(folder, ["reward.terms.aesthetic.at_least=null"])
    assert bound.terms[3].share_after < bound.terms[3].share_before
