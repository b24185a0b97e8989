"""rollout.refill_rounds: flat groups are replaced by groups of other prompts."""

from __future__ import annotations

import functools

import pyarrow.parquet
import pytest
import torch

from glm_grpo.builders.prompts import build_prompts
from glm_grpo.config import compose_config
from glm_grpo.run.checkpoints import load_checkpoint, newest_checkpoint
from glm_grpo.run.tables import read_metrics
from glm_grpo.training.batches import build_batch, build_spares
from tests.end_to_end.runs import Brightness, comparable_metrics

RUN = ("train.steps=2", "loss.kl_coef=0", "optim.learning_rate=1e-3")


@pytest.fixture
def flat_for():
    """A term that gives all images of some prompts the same score, and of others rising ones."""

    def score(words, scores, prompt):
        if any(word in prompt.prompt for word in words):
            return torch.full_like(scores, 0.5)
        return torch.arange(len(scores)) / len(scores)

    return lambda *words: Brightness(functools.partial(score, words))


@pytest.fixture
def data(tmp_path):
    """Eight prompts, of which a step takes two."""
    path = tmp_path / "words.txt"
    words = ("oak", "elm", "fir", "yew", "ash", "bay", "fig", "box")
    path.write_text("".join(f'the word "{word}"\n' for word in words))
    return f"data.path={path}"


def rows_of(folder, step):
    """Of each group in a step's table."""
    table = pyarrow.parquet.read_table(folder.rollout_path(step))
    return table.to_pylist()[:: len({*table["sample"].to_pylist()})]


def test_flat_groups_are_replaced_stored_and_counted(make_run, flat_for, data):
    term = flat_for("oak", "elm", "fir", "yew", "ash")
    trainer, _, folder = make_run(*RUN, data, "rollout.refill_rounds=6", term=term)
    trainer.run()
    metrics = read_metrics(folder)[1:]
    for step, row in zip((1, 2), metrics, strict=True):
        groups = rows_of(folder, step)
        # Two that vary are found before the eight prompts are used up, and none is drawn twice.
        assert [each["is_flat"] for each in groups] == [each["is_discarded"] for each in groups]
        assert sum(not each["is_discarded"] for each in groups) == 2
        assert len({each["prompt_id"] for each in groups}) == len(groups)
        assert row["advantage/discarded_groups"] == len(groups) - 2
        assert row["advantage/flat_fraction"] == pytest.approx(1 - 2 / len(groups))
        table = pyarrow.parquet.read_table(folder.rollout_path(step))
        mean = sum(table["total"].to_pylist()) / len(table)
        assert row["reward/mean"] == pytest.approx(mean, abs=1e-6)
        assert row["optim/grad_norm"] > 0
    assert sum(row["advantage/discarded_groups"] for row in metrics) > 0


def test_rounds_are_limited(make_run, flat_for, data):
    trainer, _, folder = make_run(
        *RUN, data, "rollout.refill_rounds=1", "train.steps=1", term=flat_for("word")
    )
    trainer.run()
    groups = rows_of(folder, 1)
    assert [each["is_discarded"] for each in groups] == [True, True, False, False]
    assert all(each["is_flat"] for each in groups)
    assert read_metrics(folder)[-1]["optim/grad_norm"] == 0


def test_flat_groups_stay_where_no_other_prompt_is_left(make_run, flat_for, data):
    trainer, _, folder = make_run(
        *RUN,
        data,
        "rollout.refill_rounds=100",
        "rollout.prompts_per_step=3",
        "train.steps=1",
        term=flat_for("word"),
    )
    trainer.run()
    groups = rows_of(folder, 1)
    assert len(groups) == 8
    assert sum(not each["is_discarded"] for each in groups) == 3


def test_nothing_changes_where_no_group_is_flat(make_run, flat_for, data):
    figures = []
    for rounds in (0, 3):
        trainer, _, folder = make_run(
            *RUN,
            data,
            f"rollout.refill_rounds={rounds}",
            term=flat_for(),
            folder=f"run-{rounds}",
        )
        trainer.run()
        weights = load_checkpoint(newest_checkpoint(folder)).tensors["policy"]
        figures.append((comparable_metrics(folder.path), weights))
    (plain, before), (refilled, after) = figures
    assert [row.pop("advantage/discarded_groups") for row in refilled[1:]] == [0.0, 0.0]
    assert plain == refilled
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def test_spare_prompts_are_those_that_a_step_does_not_hold(configs_dir):
    config = compose_config(configs_dir, "tiny", ["rollout.prompts_per_step=3"])
    prompts = build_prompts(config).training
    spares = build_spares(config, prompts, 4)
    again = build_spares(config, prompts, 4)
    held = {prompt.prompt_id for prompt in build_batch(config, prompts, 4).prompts}
    ids = [prompt.prompt_id for prompt in spares.batch(range(len(spares))).prompts]
    assert len({*ids}) == len(ids) == len(prompts) - 3
    assert not {*ids} & held
    assert again.rows == spares.rows
    assert build_spares(config, prompts, 5).rows != spares.rows
    part = spares.batch(range(2, 5))
    assert [prompt.prompt_id for prompt in part.prompts] == ids[2:5]
    whole = spares.batch(range(len(spares)))
    assert part.decode_seeds == whole.decode_seeds[2:5]
    assert part.seed == build_batch(config, prompts, 4).seed
