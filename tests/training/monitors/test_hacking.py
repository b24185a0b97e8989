from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
import torch

from glm_grpo.errors import StorageError
from glm_grpo.run.folder import RunFolder
from glm_grpo.training.monitors.hacking import (
    STEPS_IN_A_ROW,
    CanaryReading,
    HackingMonitor,
    measure_pictures,
)
from glm_grpo.types import (
    Advantages,
    Evaluation,
    Experience,
    ImageBatch,
    PromptBatch,
    Rollout,
)
from rewards.types import Prompt, RewardTable

PROMPTS = tuple(Prompt(str(index), "a sign") for index in range(4))
SEEDS = (0,) * 4


def grey(*levels):
    """Plain pictures, one level for each prompt, two of each."""
    pixels = torch.tensor(levels, dtype=torch.uint8)[:, None, None, None, None]
    return ImageBatch(pixels.expand(-1, 2, 3, 8, 8).contiguous(), SEEDS)


def table(watched, applies=(True,) * 4):
    """A trained term, and one that is watched: a score a prompt."""
    raw = torch.stack([torch.full((4, 2), 0.5), torch.tensor(watched)[:, None].expand(4, 2)], -1)
    applicable = torch.stack([torch.ones(4, dtype=torch.bool), torch.tensor(applies)], 1)
    return RewardTable(
        ("trained", "seen"), raw, applicable, torch.tensor([1.0, 0.0]), torch.full((2,), 1e-4)
    )


def evaluation(images, rewards, entropy=(1.0, 1.1, 0.9, 1.0)):
    return Evaluation(
        0,
        PROMPTS,
        images,
        rewards,
        torch.zeros(4, 2),
        entropy=torch.tensor(entropy),
    )


def experience(images, rewards, entropy=1.0):
    return Experience(
        prompts=PromptBatch(PROMPTS, 2, 32, 32, seed=0, decode_seeds=SEEDS),
        rollout=Rollout(
            token_ids=torch.zeros(4, 2, 3, dtype=torch.int64),
            log_probs=torch.full((4, 2, 3), -entropy),
            sampling_mask=None,
        ),
        images=images,
        rewards=rewards,
        totals=torch.zeros(4, 2),
        penalties=torch.zeros(4, 2),
        advantages=Advantages(torch.zeros(4, 2), torch.ones(4, dtype=torch.bool)),
    )


UNTRAINED = grey(100, 110, 90, 100)
SCORES = [0.4, 0.5, 0.6, 0.5]


@pytest.fixture
def hacking_monitor(tmp_path):
    made = HackingMonitor(RunFolder(tmp_path), watch=["seen"], evaluated=[], margin=4.0, outside={})
    made.learn(evaluation(UNTRAINED, table(SCORES)))
    return made


def measure(monitor, taken, step=2, times=STEPS_IN_A_ROW):
    """Judges the same experience at several steps in a row; the result of the last one."""
    pictures = measure_pictures(taken.prompts.prompts, taken.images)
    return [monitor.measure(step + index, taken, pictures) for index in range(times)][-1]


def names(reading):
    return {departure.name for departure in reading.departures}


def test_sentinel_is_quiet_on_what_the_untrained_model_draws(hacking_monitor):
    reading = measure(hacking_monitor, experience(UNTRAINED, table(SCORES)))

    assert reading.departures == ()
    assert reading.metrics["canary/departures"] == 0.0
    # Minus the mean log-probability; the mean of the watched scores; no pixel is bright.
    assert reading.metrics["canary/token_entropy"] == pytest.approx(1.0)
    assert reading.metrics["canary/seen"] == pytest.approx(0.5)
    assert reading.metrics["canary/bright_fraction"] == 0.0


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        (experience(grey(250, 250, 250, 250), table(SCORES)), "bright_fraction"),
        (experience(grey(3, 3, 3, 3), table(SCORES)), "dark_fraction"),
        (experience(UNTRAINED, table(SCORES), entropy=0.2), "token_entropy"),
        (experience(UNTRAINED, table([0.05, 0.1, 0.0, 0.1])), "seen"),
    ],
)
def test_sentinel_names_the_canary_that_left_its_band(hacking_monitor, changed, name):
    reading = measure(hacking_monitor, changed)

    assert names(reading) == {name}
    assert reading.metrics["canary/departures"] == 1.0


def test_copies_of_the_source_leave_their_band_upwards_alone(tmp_path):
    drawn = grey(40, 90, 140, 200)
    copied = tuple(
        replace(prompt, sources=(pixels[0],))
        for prompt, pixels in zip(PROMPTS, drawn.pixels, strict=True)
    )
    edited = tuple(
        replace(prompt, sources=(255 - pixels,))
        for prompt, (pixels,) in zip(PROMPTS, ((each[0],) for each in drawn.pixels), strict=True)
    )
    monitor = HackingMonitor(RunFolder(tmp_path), watch=[], evaluated=[], margin=4.0, outside={})
    monitor.learn(replace(evaluation(drawn, table(SCORES)), prompts=edited))
    step = experience(drawn, table(SCORES))

    def of(prompts):
        return measure(monitor, replace(step, prompts=replace(step.prompts, prompts=prompts)))

    assert of(edited).metrics["canary/source_copies"] == 0.0
    assert names(of(edited)) == set()
    assert of(copied).metrics["canary/source_copies"] == 1.0
    assert names(of(copied)) == {"source_copies"}
    # The untrained model copied: to copy less is no departure.
    monitor.learn(replace(evaluation(drawn, table(SCORES)), prompts=copied))
    assert names(of(edited)) == set()
    restored = HackingMonitor(RunFolder(tmp_path), watch=[], evaluated=[], margin=4.0, outside={})
    restored.restore()
    assert restored._bands == monitor._bands


def test_sentinel_warns_when_a_canary_leaves_and_when_it_comes_back(hacking_monitor, caplog):
    bright = experience(grey(250, 250, 250, 250), table(SCORES))
    usual = experience(UNTRAINED, table(SCORES))
    with caplog.at_level(logging.WARNING):
        # Two steps of unusual prompts are no departure, however often.
        for each in (bright, usual, bright):
            assert measure(hacking_monitor, each, times=2).departures == ()
        assert caplog.messages == []
        measure(hacking_monitor, bright, times=2)
        measure(hacking_monitor, usual, times=2)

    left, back = caplog.messages
    assert "bright_fraction" in left
    assert "above" in left
    assert back == "canary: bright_fraction is back in its band"


def test_sentinel_leaves_out_prompts_to_which_a_watched_term_does_not_apply(hacking_monitor):
    # Where the term does not apply a table holds 0, which would pull the mean down.
    scores = table([0.5, 0.5, 0.0, 0.0], applies=(True, True, False, False))

    reading = measure(hacking_monitor, experience(UNTRAINED, scores))

    assert reading.metrics["canary/seen"] == pytest.approx(0.5)
    assert reading.departures == ()


def test_sentinel_does_not_judge_what_has_no_value_on_the_held_out_prompts(tmp_path, caplog):
    hacking_monitor = HackingMonitor(
        RunFolder(tmp_path), watch=["seen"], evaluated=[], margin=4.0, outside={}
    )
    single = ImageBatch(UNTRAINED.pixels[:, :1], SEEDS)
    nowhere = table(SCORES, applies=(False,) * 4)
    with caplog.at_level(logging.WARNING):
        hacking_monitor.learn(evaluation(single, nowhere))

    reading = measure(hacking_monitor, experience(UNTRAINED, table([9.0] * 4)))

    named = [message.partition(" (")[0].partition(": ")[2] for message in caplog.messages]
    assert sorted(named) == ["pixel_diversity", "seen"]
    assert reading.departures == ()
    assert reading.metrics["canary/seen"] == 9.0
    assert math.isfinite(reading.metrics["canary/pixel_diversity"])


def test_sentinel_of_a_resumed_run_judges_as_before(hacking_monitor, tmp_path):
    changed = experience(grey(250, 250, 250, 250), table(SCORES), entropy=0.2)
    before = measure(hacking_monitor, changed, times=2)
    resumed = HackingMonitor(
        RunFolder(tmp_path),
        watch=["seen"],
        evaluated=[],
        margin=4.0,
        outside=dict(hacking_monitor._outside),
    )
    resumed.restore()

    assert before.departures == ()
    assert measure(resumed, changed, times=1) == measure(hacking_monitor, changed, times=1)
    assert names(measure(resumed, changed, times=1)) == {"bright_fraction", "token_entropy"}


def test_the_first_step_moves_the_bands_to_the_prompts_that_are_trained_on(tmp_path, caplog):
    def made():
        return HackingMonitor(
            RunFolder(tmp_path), watch=["seen"], evaluated=[], margin=4.0, outside={}
        )

    monitor = made()
    monitor.learn(evaluation(UNTRAINED, table(SCORES)))
    # As after a warm start on these prompts: surer, and better.
    first = experience(grey(250, 240, 250, 240), table([0.9, 1.0, 0.9, 1.0]), entropy=0.2)

    with caplog.at_level(logging.WARNING):
        assert measure(monitor, first, step=1).departures == ()
        resumed = made()
        resumed.restore()
        assert measure(resumed, first).departures == ()
        assert caplog.messages == []
        # What the held-out prompts were is a departure now.
        assert names(measure(resumed, experience(UNTRAINED, table(SCORES)))) >= {"token_entropy"}


def test_a_term_of_evaluations_is_judged_there_alone_and_may_rise(tmp_path, caplog):
    monitor = HackingMonitor(
        RunFolder(tmp_path), watch=[], evaluated=["seen"], margin=4.0, outside={}
    )
    monitor.learn(evaluation(UNTRAINED, table(SCORES)))
    resumed = HackingMonitor(
        RunFolder(tmp_path), watch=[], evaluated=["seen"], margin=4.0, outside={}
    )
    resumed.restore()
    # Sample std 0.0816, four prompts on both sides: 0.5 - 4 * 0.0816 * sqrt(1/2) = 0.269.
    lowest = 0.5 - 4 * math.sqrt(0.02 / 3) * math.sqrt(0.5)

    def judge(*scores, by=monitor):
        return by.measure_evaluation(evaluation(UNTRAINED, table(list(scores))))

    assert judge(1.0, 1.0, 1.0, 1.0) == CanaryReading({"canary/seen": 1.0}, ())
    assert judge(0.27, 0.27, 0.27, 0.27).departures == ()
    with caplog.at_level(logging.WARNING):
        assert judge(0.26, 0.26, 0.26, 0.26).departures == ()
        (departure,) = judge(0.26, 0.26, 0.26, 0.26).departures
        # A step says nothing about it, and nothing of it is forgotten there.
        of_step = measure(monitor, experience(UNTRAINED, table([0.0] * 4)))
        judge(0.25, 0.25, 0.25, 0.25)
        judge(*SCORES)
    assert (departure.name, departure.high) == ("seen", math.inf)
    assert departure.low == pytest.approx(lowest)
    assert of_step.departures == ()
    assert "canary/seen" not in of_step.metrics
    left, back = caplog.messages
    assert "seen 0.26 is below 0.2691..inf" in left
    assert back == "canary: seen is back in its band"
    judge(0.1, 0.1, 0.1, 0.1, by=resumed)
    assert names(judge(0.1, 0.1, 0.1, 0.1, by=resumed)) == {"seen"}


def test_sentinel_says_where_bands_are_missing(tmp_path):
    with pytest.raises(StorageError, match="canaries.json"):
        HackingMonitor(
            RunFolder(tmp_path), watch=[], evaluated=[], margin=4.0, outside={}
        ).restore()
