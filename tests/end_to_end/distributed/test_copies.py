"""Two processes with copies of the policy (DDP) give what one gives."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

from tests.end_to_end.distributed.conftest import assert_same_metrics, files_of, metrics_of

pytestmark = [pytest.mark.timeout(900)]

EXACT = ("step", "prompt_id", "prompt", "sample", "decode_seed", "token_ids", "is_flat", "image")
CLOSE = ("raw/ssim", "raw/ocr", "raw/aesthetic", "total", "penalty", "advantage")

# Advantages over the whole batch, groups to recheck on either process, two passes over a rollout in
# two minibatches, of which one has a prompt of the first process alone, evaluations of three
# prompts on two processes.
ADAPTERS = (
    "model.adapter={rank: 4, alpha: 8.0}",
    "optim.learning_rate=2e-3",
    "advantage.normalization=batch_std",
    "decode.rollout_steps=1",
    "decode.recheck_groups=3",
    "decode.recheck_every=1",
    "train.epochs_per_rollout=2",
    "train.minibatches=2",
    "loss.reference_sync_steps=1",
    "eval.ema_decay=0.5",
    "sft.weight=0.1",
    *("data.path=tiny:train", "ssim=0.2"),
    "train.eval_every=2",
    "trackers=[tensorboard]",
)


def columns(path):
    table = pyarrow.parquet.read_table(path)
    return {name: table[name].to_pylist() for name in table.column_names}


def rows_by_image(path):
    rows = pyarrow.parquet.read_table(path).to_pylist()
    return {(row["prompt_id"], row["sample"]): row for row in rows}


def assert_same_table(run, expected, name, *, within=1e-5):
    ours, theirs = columns(run / name), columns(expected / name)
    assert ours.keys() == theirs.keys()
    for column in ours.keys() & set(EXACT):
        assert ours[column] == theirs[column], column
    for column in ours.keys() & set(CLOSE):
        for own, other in zip(ours[column], theirs[column], strict=True):
            assert own == pytest.approx(other, abs=within), column
    for own, other in zip(ours.get("log_probs", []), theirs.get("log_probs", []), strict=True):
        # Of single tokens; the least probable ones differ most, by rounding: 1e-4 after four
        # updates.
        assert own == pytest.approx(other, abs=5e-4)


def test_two_processes_give_the_figures_tables_and_images_of_one(launcher):
    one = launcher.run("one", *ADAPTERS, "train.micro_batch_size=6")
    # Of six images the first process has four, 3 + 1 at a time, and the second two.
    two = launcher.run("two", *ADAPTERS, "train.micro_batch_size=3", processes=2)
    assert_same_metrics(two, one)
    # The policy moved, rewards were compared, and the recheck was made: there is something to be
    # equal in.
    _, first, second = metrics_of(one)
    assert first["kl/reference"] != second["kl/reference"]
    assert first["optim/grad_norm"] > 1e-3
    assert "decode/rank_correlation/total" in first

    for step in (1, 2):
        assert_same_table(two, one, f"rollouts/step-{step:06d}.parquet")
    for step in (0, 2):
        # After updates, a pixel in many is rounded to the other of two levels.
        assert_same_table(two, one, f"evaluations/step-{step:06d}.parquet", within=1e-4)
    table = columns(two / "rollouts" / "step-000001.parquet")
    # Three prompts of two images each, in the order of the batch.
    assert len(set(table["prompt_id"])) == 3
    assert table["prompt_id"][::2] == table["prompt_id"][1::2]
    assert any(value != 0 for value in table["advantage"])

    events = r"tensorboard/.*"
    ours, theirs = (
        [re.sub(events, "events", name) for name in files_of(run)] for run in (one, two)
    )
    assert ours == theirs
    images = [name for name in files_of(one) if name.endswith(".png")]
    assert len(images) > 10
    for name in images:
        ours, theirs = (np.asarray(Image.open(run / name), dtype=int) for run in (two, one))
        # Rounded to 256 levels, either way.
        assert abs(ours - theirs).max() <= 1, name


BY_PLACE = """
import torch
from rewards import Scores

def score(prompts, pixels):
    light = pixels.float().mean(dim=1) / 255  # [N, H, W]
    # Groups of longer words are flat.
    is_zero_std = torch.tensor([len(prompt.texts[0]) > 3 for prompt in prompts])
    parts = torch.where(is_zero_std[:, None, None], 0.5, light) / light[0].numel()
    return Scores(parts.sum(dim=(1, 2)), score_map=parts)
"""


def test_credit_by_place_and_refills_are_those_of_one_process(launcher):
    (launcher.folder / "by_place.py").write_text(BY_PLACE)
    launcher.write_prompts("train.txt", "red", ("STOP", "GO", "OPEN", "UP", "EXIT", "CAT", "ON"))
    words = (
        "+reward.terms.mine={kind: custom, weight: 1.0, function: 'by_place.py:score'}",
        *("ocr=null", "aesthetic=null", "ssim=null", "advantage.credit=place"),
        *("rollout.dynamic_sampling_rounds=2", "train.steps=1"),
        "model.adapter={rank: 4, alpha: 8.0}",
    )
    one = launcher.run("one-by-place", *words)
    two = launcher.run("two-by-place", *words, processes=2)
    assert_same_metrics(two, one)
    # Each process stores its own replacements behind its own groups.
    ours, theirs = (rows_by_image(run / "rollouts/step-000001.parquet") for run in (two, one))
    assert ours.keys() == theirs.keys()
    for image, row in theirs.items():
        for name in (*EXACT, "is_discarded"):
            assert ours[image][name] == row[name], (image, name)
        for name in ("raw/mine", "advantage", "credit"):
            assert np.asarray(ours[image][name]) == pytest.approx(np.asarray(row[name]), abs=1e-3)
    assert {row["is_discarded"] for row in ours.values()} == {True, False}
    assert any(np.ptp(row["credit"]) > 0 for row in ours.values())


@pytest.mark.long
def test_a_launch_by_torchrun_trains(launcher):
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ACCELERATE_", "FSDP_", "PYTEST_"))
    }
    subprocess.run(
        [sys.executable, *launch, *launcher.arguments("torchrun", ())],
        cwd=launcher.folder,
        env={**inherited, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""},
        check=True,
        timeout=400,
    )
    assert [row["step"] for row in metrics_of(launcher.folder / "torchrun")] == [0, 1, 2]
