"""Keys of memory or speed never make a run fail: they are brought to the nearest that works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from glm_grpo.config import EffectiveConfig, effective_config, flatten, validate_config

Bend = Callable[[str, object], dict[str, Any]]


@pytest.fixture
def small(bend: Bend) -> Bend:
    """4 prompts x 6 images, 8 steps."""
    bend("rollout.prompts_per_step", 4)
    bend("rollout.group_size", 6)
    bend("train.micro_batch_size", 12)
    bend("train.steps", 8)
    return bend


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_warm_up_that_the_run_is_too_short_for_is_kept_and_said(
    small: Bend, schedule: str
) -> None:
    small("optim.schedule", schedule)
    effective = effective_config(validate_config(small("optim.warmup_steps", 9)))
    assert effective.config.optim.warmup_steps == 9
    assert effective.note.startswith("optim.warmup_steps 9: ")
    assert effective_config(validate_config(small("optim.warmup_steps", 8))).note == ""


@pytest.mark.parametrize(
    ("key", "given", "used", "note"),
    [
        ("train.micro_batch_size", 25, 24, "train.micro_batch_size: 24 "),
        ("train.micro_batch_size", 24, 24, ""),
        ("train.micro_batch_size", 7, 7, "7 leaves 3 of 24 images"),
    ],
)
def test_values_that_work_are_kept_and_others_brought_to_the_nearest(
    small: Bend, key: str, given: int, used: int, note: str
) -> None:
    config = validate_config(small(key, given))
    effective = effective_config(config)
    assert flatten(effective.config.model_dump())[key] == used
    assert note in effective.note
    assert bool(effective.note) == bool(note)
    # The config itself, which the run folder keeps, is as given.
    assert flatten(config.model_dump())[key] == given


def test_a_recheck_takes_at_most_the_groups_of_a_step(small: Bend) -> None:
    small("decode.recheck_groups", 5)
    in_full = validate_config(small("decode.rollout_steps", None))
    assert effective_config(in_full) == EffectiveConfig(in_full, "")  # there is no recheck
    effective = effective_config(validate_config(small("decode.rollout_steps", 1)))
    assert effective.config.decode.recheck_groups == 4
    assert effective.note.startswith("decode.recheck_groups: 4 is used instead of 5")


def test_processes_have_the_images_of_their_part(small: Bend) -> None:
    # 4 prompts over 3 processes: the largest part is 2 prompts x 6 images.
    config = validate_config(small("train.micro_batch_size", 20))
    assert effective_config(config, processes=3).config.train.micro_batch_size == 12
    assert effective_config(config, processes=4).config.train.micro_batch_size == 6


def test_all_changes_are_told_in_one_line(small: Bend) -> None:
    small("train.micro_batch_size", 100)
    small("decode.rollout_steps", 1)
    note = effective_config(validate_config(small("decode.recheck_groups", 100))).note
    assert [each.partition(":")[0] for each in note.split("; ")] == [
        "train.micro_batch_size",
        "decode.recheck_groups",
    ]


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"loss.ratio_level": "sequence"}, "loss.ratio_level sequence: no effect"),
        ({"loss.two_sided_clip": 4.0}, "loss.two_sided_clip 4: no effect"),
        (
            {"loss.clip_low": 0.1, "loss.clip_high": 0.28},
            "loss.clip_low 0.1, loss.clip_high 0.28: no effect",
        ),
        ({"loss.clip_high": 0.28, "train.minibatches": 2}, ""),
        ({"loss.two_sided_clip": 4.0, "train.epochs_per_rollout": 2}, ""),
        ({"loss.two_sided_clip": 4.0, "train.minibatches": 2}, ""),
        ({"train.skip_zero_std": True}, "train.skip_zero_std: no effect"),
        ({"train.skip_zero_std": True, "loss.kl_coef": 0.0}, ""),
        (
            {"train.method": "sft"},
            "train.method sft: ",
        ),
        (
            {
                "rollout.dynamic_sampling_rounds": 2,
                "loss.kl_placement": "reward",
                "loss.kl_estimator": "k1",
            },
            "rollout.dynamic_sampling_rounds: no effect",
        ),
        (
            {"loss.reference_sync_steps": 2, "loss.kl_coef": 0.0},
            "loss.reference_sync_steps: no effect",
        ),
    ],
)
def test_what_has_no_effect_is_said(bend: Bend, changes: dict[str, object], note: str) -> None:
    values: Any = bend("train.steps", 40)
    for key, value in changes.items():
        section, name = key.split(".")
        values[section][name] = value
    found = effective_config(validate_config(values)).note
    assert note in found
    assert bool(note) == ("no effect" in found)
