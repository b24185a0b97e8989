from __future__ import annotations

import logging
import math
import re
from dataclasses import replace

import pytest
import torch

from glm_grpo.errors import StorageError
from glm_grpo.run.folder import RunFolder
from glm_grpo.training.monitors.hacking import (
    STEPS_IN_A_ROW,
    CanaryReading,
    HackingMonitor,
)
from glm_grpo.types import (
    Evaluation,
    Experience,
    ImageBatch,
    PromptBatch,
    Rollout,
)
from rewards.canaries import measure_images
from rewards.types import Prompt, RewardTable

PROMPTS = tuple(Prompt(str(index), "a sign") for index in range(4))
SEEDS = (0,) * 4


def grey(*levels):
    """Plain images, one level for each prompt, two of each."""
    pixels = torch.tensor(levels, dtype=torch.uint8)[:, None, None, None, None]
    return ImageBatch(pixels.expand(-1, 2, 3, 8, 8).contiguous(), SEEDS)


def table(watched, applies=(True,) * 4):
    """A trained term, and one that is watched: a score a prompt."""
    raw = torch.stack([torch.full((4, 2), 0.5), torch.tensor(watched)[:, None].expand(4, 2)], -1)
    applicable = torch.stack([torch.ones(4, dtype=torch.bool), torch.tensor(applies)], 1)
    return RewardTable(
        ("trained", "seen"), raw, applicable, torch.tensor([1.0, 0.0]), torch.full((2,), 1e-4)
    )


def evaluation(images, rewards, prompts=PROMPTS):
    entropy = torch.tensor((1.0, 1.1, 0.9, 1.0))
    return Evaluation(0, prompts, images, rewards, torch.zeros(4, 2), entropy=entropy)


def experience(images, rewards, entropy=1.0, prompts=PROMPTS):
    return Experience(
        prompts=PromptBatch(prompts, 2, 32, 32, seed=0, decode_seeds=SEEDS),
        rollout=Rollout(
            token_ids=torch.zeros(4, 2, 3, dtype=torch.int64),
            log_probs=torch.full((4, 2, 3), -entropy),
            sampling_mask=None,
        ),
        images=images,
        scores=rewards,
        totals=torch.zeros(4, 2),
        penalties=torch.zeros(4, 2),
        advantages=torch.zeros(4, 2, 1),
    )


BASE = grey(100, 110, 90, 100)
SCORES = [0.4, 0.5, 0.6, 0.5]
USUAL = experience(BASE, table(SCORES))
BRIGHT = experience(grey(250, 250, 250, 250), table(SCORES))


@pytest.fixture
def make_monitor(tmp_path):
    def make(*, watch=("seen",), evaluated=(), outside=None):
        outside = {} if outside is None else outside
        return HackingMonitor(
            RunFolder(tmp_path), watch=watch, evaluated=evaluated, margin=4.0, outside=outside
        )

    return make


@pytest.fixture
def monitor(make_monitor):
    made = make_monitor()
    made.learn(evaluation(BASE, table(SCORES)))
    return made


def measure(monitor, taken, step=2, times=STEPS_IN_A_ROW):
    """Judges the same experience at several steps in a row; the result of the last one."""
    images = measure_images(taken.prompts.prompts, taken.images.pixels)
    return [monitor.measure(step + index, taken, images) for index in range(times)][-1]


def names(reading):
    return {departure.name for departure in reading.departures}


def test_monitor_is_quiet_on_what_the_base_model_draws(monitor):
    reading = measure(monitor, USUAL)

    assert reading.departures == ()
    assert reading.metrics["canary/departures"] == 0.0
    # Minus the mean log-probability; the mean of the watched scores; no pixel is bright.
    assert reading.metrics["canary/token_entropy"] == pytest.approx(1.0)
    assert reading.metrics["canary/seen"] == pytest.approx(0.5)
    assert reading.metrics["canary/bright_fraction"] == 0.0


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        (BRIGHT, "bright_fraction"),
        (experience(BASE, table(SCORES), entropy=0.2), "token_entropy"),
        (experience(BASE, table([0.05, 0.1, 0.0, 0.1])), "seen"),
    ],
)
def test_monitor_names_the_canary_that_left_its_band(monitor, changed, name):
    reading = measure(monitor, changed)

    assert names(reading) == {name}
    assert reading.metrics["canary/departures"] == 1.0


def test_copies_of_the_source_leave_their_band_upwards_alone(make_monitor):
    drawn = grey(40, 90, 140, 200)

    def editing(sources):
        pairs = zip(PROMPTS, sources, strict=True)
        return tuple(replace(prompt, sources=(source[0],)) for prompt, source in pairs)

    copied, edited = editing(drawn.pixels), editing(255 - drawn.pixels)
    monitor = make_monitor()
    monitor.learn(evaluation(drawn, table(SCORES), edited))

    def of(prompts):
        return measure(monitor, experience(drawn, table(SCORES), prompts=prompts))

    assert of(edited).metrics["canary/source_copies"] == 0.0
    assert names(of(edited)) == set()
    assert of(copied).metrics["canary/source_copies"] == 1.0
    assert names(of(copied)) == {"source_copies"}
    # The base model copied: to copy less is no departure.
    monitor.learn(evaluation(drawn, table(SCORES), copied))
    assert names(of(edited)) == set()


def test_monitor_warns_when_a_canary_leaves_and_when_it_comes_back(monitor, caplog):
    with caplog.at_level(logging.WARNING):
        # Two steps of unusual prompts are no departure, however often.
        for each in (BRIGHT, USUAL, BRIGHT):
            assert measure(monitor, each, times=2).departures == ()
        assert caplog.messages == []
        measure(monitor, BRIGHT, times=2)
        measure(monitor, USUAL, times=2)

    left, back = caplog.messages
    assert re.search("bright_fraction .*above", left)
    assert "bright_fraction" in back


def test_monitor_leaves_out_prompts_to_which_a_watched_term_does_not_apply(monitor):
    # Where the term does not apply a table holds 0, which would pull the mean down.
    scores = table([0.5, 0.5, 0.0, 0.0], applies=(True, True, False, False))
    reading = measure(monitor, experience(BASE, scores))

    assert reading.metrics["canary/seen"] == pytest.approx(0.5)
    assert reading.departures == ()


def test_monitor_leaves_out_images_that_a_watched_term_refused(monitor):
    refused = table([0.4, 0.5, 0.6, 0.5])
    refused.raw[0, 0, 1] = refused.raw[1, :, 1] = math.nan
    reading = measure(monitor, experience(BASE, refused))
    # Means of prompts 0.4, 0.6 and 0.5.
    assert reading.metrics["canary/seen"] == pytest.approx(0.5)
    assert not names(reading)


def test_monitor_does_not_judge_what_has_no_value_on_the_held_out_prompts(make_monitor, caplog):
    monitor = make_monitor()
    single = ImageBatch(BASE.pixels[:, :1], SEEDS)
    with caplog.at_level(logging.WARNING):
        monitor.learn(evaluation(single, table(SCORES, applies=(False,) * 4)))
    reading = measure(monitor, experience(BASE, table([9.0] * 4)))

    assert ": pixel_diversity, seen (" in caplog.text
    assert reading.departures == ()
    assert reading.metrics["canary/seen"] == 9.0


def test_monitor_of_a_resumed_run_judges_as_before(monitor, make_monitor):
    changed = experience(grey(250, 250, 250, 250), table(SCORES), entropy=0.2)
    measure(monitor, changed, times=2)
    resumed = make_monitor(outside=dict(monitor._outside))
    resumed.restore()

    reading = measure(resumed, changed, times=1)
    assert names(reading) == {"bright_fraction", "token_entropy"}
    assert reading == measure(monitor, changed, times=1)


def test_a_resumed_run_may_watch_other_terms(monitor, make_monitor, caplog):
    resumed = make_monitor(watch=["trained"])
    resumed.restore()
    # It has no band: the base model is gone.
    assert ": trained (" in caplog.text
    reading = measure(resumed, experience(BASE, table([9.0] * 4)))
    assert reading.departures == ()
    assert reading.metrics["canary/trained"] == 0.5


def test_the_first_step_moves_the_bands_to_the_prompts_that_are_trained_on(monitor, make_monitor):
    # As after a warm start on these prompts: surer, and better.
    first = experience(grey(250, 240, 250, 240), table([0.9, 1.0, 0.9, 1.0]), entropy=0.2)

    assert measure(monitor, first, step=1).departures == ()
    resumed = make_monitor()
    resumed.restore()
    assert measure(resumed, first).departures == ()
    # What the held-out prompts were is a departure now.
    assert names(measure(resumed, USUAL)) >= {"token_entropy"}


def test_a_term_of_evaluations_is_judged_there_alone_and_may_rise(make_monitor, caplog):
    monitor = make_monitor(watch=(), evaluated=["seen"])
    monitor.learn(evaluation(BASE, table(SCORES)))
    # Sample std 0.0816, four prompts on both sides: 0.5 - 4 * 0.0816 * sqrt(1/2) = 0.269.
    lowest = 0.5 - 4 * math.sqrt(0.02 / 3) * math.sqrt(0.5)

    def judge(score):
        return monitor.measure_evaluation(evaluation(BASE, table([score] * 4)))

    assert judge(1.0) == CanaryReading({"canary/seen": 1.0}, ())
    assert judge(0.27).departures == ()
    with caplog.at_level(logging.WARNING):
        assert judge(0.26).departures == ()
        (departure,) = judge(0.26).departures
        # A step says nothing about it, and nothing of it is forgotten there.
        of_step = measure(monitor, experience(BASE, table([0.0] * 4)))
        judge(0.25)
        judge(0.5)
    assert (departure.name, departure.high) == ("seen", math.inf)
    assert departure.low == pytest.approx(lowest)
    assert of_step.departures == ()
    assert "canary/seen" not in of_step.metrics
    left, back = caplog.messages
    assert "below" in left
    assert "seen" in back


def test_monitor_says_where_bands_are_missing(make_monitor):
    with pytest.raises(StorageError, match=r"canaries.json"):
        make_monitor().restore()
