"""Two processes with copies of the policy (DDP) give what one gives."""

from __future__ import annotations

import re

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
    "train.updates_per_rollout=2",
    "train.minibatches_per_rollout=2",
    "loss.reference_sync_every=1",
    "eval.ema_decay=0.5",
    "anchor.weight=0.1",
    "data.path=tiny:train",
    "train.eval_every=2",
    "trackers=[tensorboard]",
)


@pytest.fixture(scope="module")
def adapters(launcher):
    """One process with the whole batch at once, and two whose parts are cut unevenly."""
    one = launcher.run("one", *ADAPTERS, "train.micro_batch_size=6")
    # Of six images the first process has four, 3 + 1 at a time, and the second two.
    two = launcher.run("two", *ADAPTERS, "train.micro_batch_size=3", processes=2)
    return one, two


def columns(path):
    table = pyarrow.parquet.read_table(path)
    return {name: table[name].to_pylist() for name in table.column_names}


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


def test_two_processes_give_the_figures_of_one(adapters):
    one, two = adapters
    assert_same_metrics(two, one)
    # The policy moved, rewards were compared, and the recheck was made: there is something to be
    # equal in.
    _, first, second = metrics_of(one)
    assert first["kl/reference"] != second["kl/reference"]
    assert first["optim/grad_norm"] > 1e-3
    assert "decode/rank_correlation/total" in first


def test_two_processes_give_the_tables_of_one(adapters):
    one, two = adapters
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


def test_one_process_of_two_writes_the_run_folder(adapters):
    one, two = adapters
    events = r"tensorboard/.*"
    ours, theirs = ([re.sub(events, "events", name) for name in files_of(run)] for run in adapters)
    assert ours == theirs
    pictures = [name for name in files_of(one) if name.endswith(".png")]
    assert len(pictures) > 10
    for name in pictures:
        ours, theirs = (np.asarray(Image.open(run / name), dtype=int) for run in (two, one))
        # Rounded to 256 levels, either way.
        assert abs(ours - theirs).max() <= 1, name


@pytest.mark.long
def test_two_processes_replace_flat_groups_as_one(launcher):
    # Coarse scores: of two pictures both are often read alike.
    alone = (f"reward.terms.{name}.weight=0" for name in ("ssim", "aesthetic"))
    more = (
        "rollout.refill_rounds=2",
        "train.minibatches_per_rollout=2",
        "rollout.temperature=0.5",
        *alone,
    )
    one = launcher.run("refill-one", *more, "train.steps=1")
    two = launcher.run("refill-two", *more, "train.steps=1", processes=2)
    assert_same_metrics(two, one)
    names = ("prompt_id", "sample", "token_ids", "is_flat", "is_discarded")
    tables = (columns(run / "rollouts" / "step-000001.parquet") for run in (two, one))
    # One after another the processes have their groups of all rounds.
    of_two, of_one = (
        sorted(zip(*(table[name] for name in names), strict=True)) for table in tables
    )
    assert of_two == of_one
    # The first process has two groups of three; what it replaces decides what the second takes.
    assert metrics_of(one)[1]["advantage/discarded_groups"] >= 2


@pytest.mark.long
def test_two_processes_learn_target_pictures_as_one(launcher):
    # The second process has one prompt of three, and in one minibatch none.
    sft = (
        "train.method=sft",
        "data.path=tiny:train",
        "train.minibatches_per_rollout=2",
        "train.eval_every=2",
    )
    one = launcher.run("sft-one", *sft, "train.micro_batch_size=2")
    two = launcher.run("sft-two", *sft, "train.micro_batch_size=1", processes=2)
    assert_same_metrics(two, one)
    _, first, second = metrics_of(one)
    assert 0 < second["sft/cross_entropy"] != first["sft/cross_entropy"]
    assert_same_table(two, one, "evaluations/step-000002.parquet")
