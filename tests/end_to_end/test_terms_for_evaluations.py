"""`when: evaluation`: a term that scores evaluations and nothing that is trained on."""

from __future__ import annotations

import pyarrow.parquet

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics
from tests.end_to_end.conftest import ONE_TERM


def test_it_scores_evaluations_alone_and_changes_nothing_else(make_trainer):
    run = ("train.steps=1", "rollout.group_size=2", *ONE_TERM)
    judged = ("+reward.terms.psnr.weight=0", "+reward.terms.psnr.when=evaluation")
    with_it, _, run_dir = make_trainer(*run, *judged, folder="with", held_out=2)
    with_it.run()
    without, _, plain_dir = make_trainer(*run, folder="without", held_out=2)
    without.run()

    table = pyarrow.parquet.read_table(run_dir / "rollouts" / "step-000001.parquet")
    plain = pyarrow.parquet.read_table(plain_dir / "rollouts" / "step-000001.parquet")
    assert table["raw/psnr"].null_count == len(table)
    for name in ("total", "advantage", "token_ids"):
        assert table[name].to_pylist() == plain[name].to_pylist()
    (start, row), (plain_start, _) = (read_metrics(RunFolder(d)) for d in (run_dir, plain_dir))
    assert row["reward/psnr/mean"] is None
    for each in (start, row):
        assert 0 < each["eval/psnr"] < 1
    assert start["eval/total"] == plain_start["eval/total"]
