"""Rollouts are decoded with fewer steps, and a recheck says whether they rank badly."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from glm_grpo.models.glm_image.decoder import GlmImageDecoder
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics
from tests.end_to_end.runs import Brightness

RUN = (
    *("rollout.prompts_per_step=2", "rollout.group_size=2", "train.micro_batch_size=4"),
    *("train.steps=2", "decode.rollout_steps=1", "decode.recheck_every=1"),
    "decode.recheck_groups=2",
)
CHEAP, FULL = 1, 2


class TurningDecoder(GlmImageDecoder):
    """Draws negatives unless it takes all steps, and writes down how many it takes for a group."""

    def __init__(self, decoder, taken):
        self.__dict__.update(vars(decoder))
        self._taken = taken

    def decode_groups(self, batch, token_ids):
        for group in super().decode_groups(batch, token_ids):
            self._taken.append(self.steps)
            yield group if self.steps == FULL else 255 - group


@pytest.fixture
def taken():
    """Denoising steps of every group that was drawn."""
    return []


@pytest.fixture
def turn(taken):
    """Makes the stage of a run one whose cheap decode ranks the wrong way round."""

    def change(models):
        return dataclasses.replace(models, decoder=TurningDecoder(models.decoder, taken))

    return change


def decode_metrics(run_dir):
    """Of every step but 0: metrics of the decode, without the prefix."""
    return [
        {key[len("decode/") :]: row[key] for key in row if key.startswith("decode/")}
        for row in read_metrics(RunFolder(run_dir))[1:]
    ]


def test_a_run_says_that_its_cheap_decode_ranks_badly(make_trainer, turn, taken, caplog):
    trainer, _, run_dir = make_trainer(*RUN, term=Brightness(), change_stage=turn, held_out=1)
    with caplog.at_level(logging.WARNING, logger="glm_grpo.training.monitors.recheck"):
        trainer.run()
    # Between the evaluations, two groups drawn cheaply and their recheck in each of two steps.
    assert taken == [FULL, *[CHEAP, CHEAP, FULL, FULL] * 2, FULL]
    warnings = [record.getMessage() for record in caplog.records if "recheck" in record.name]
    assert [warning.split(":")[0] for warning in warnings] == ["step 1", "step 2"]
    found = {"rank_correlation/brightness": -1.0, "rank_correlation/total": -1.0}
    assert decode_metrics(run_dir) == [pytest.approx(found)] * 2
