"""Prompts whose groups had a spread are drawn more often, new ones first, and all of them again."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from glm_grpo.data.prompt_sampling import draw_order, group_spreads, note_spreads, sampling_metrics

IDS = ("a", "b", "c", "d")
SPREADS = {"a": 0.3, "b": 0.1, "c": 0.0, "d": 0.0}
# A quarter is shared by all four, three quarters by a and b as 3 to 1.
PROBABILITIES = {"a": 0.625, "b": 0.25, "c": 0.0625, "d": 0.0625}


def firsts(spreads: dict[str, float], draws: int) -> Counter[str]:
    orders = (draw_order(IDS, spreads, range(4), step=step, seed=0) for step in range(1, draws + 1))
    return Counter(IDS[order[0]] for order in orders)


def test_the_spread_of_a_group_is_that_of_the_images_which_count() -> None:
    rewards = torch.tensor(
        [
            [0.0, 1.0, 0.0, 1.0],
            [0.3, 0.3, 0.3, 0.3],
            [0.0, 0.4, math.nan, math.nan],
            [0.7, math.nan, math.nan, math.nan],
            [math.nan] * 4,
        ]
    )
    spreads = group_spreads("abcde", rewards)
    assert spreads == pytest.approx({"a": 0.5, "b": 0.0, "c": 0.2, "d": 0.0, "e": 0.0})
    assert spreads["b"] == 0


def test_a_later_visit_counts_half() -> None:
    spreads: dict[str, float] = {}
    for visit in ({"a": 0.4, "b": 0.2}, {"a": 0.0}, {"a": 0.6}):
        note_spreads(spreads, visit)
    assert spreads == pytest.approx({"a": 0.4, "b": 0.2})


def test_unseen_prompts_come_first_in_their_order() -> None:
    order = draw_order(IDS, {"b": 9.0}, (2, 1, 3, 0), step=5, seed=0)
    assert order == [2, 3, 0, 1]


def test_prompts_are_drawn_in_proportion_to_their_spread_and_every_one_has_a_floor() -> None:
    draws = 4000
    counts = firsts(SPREADS, draws)
    for prompt_id, probability in PROBABILITIES.items():
        deviation = math.sqrt(draws * probability * (1 - probability))
        assert abs(counts[prompt_id] - draws * probability) < 4 * deviation, prompt_id


def test_prompts_without_any_spread_are_equally_probable() -> None:
    counts = firsts(dict.fromkeys(IDS, 0.0), 1000)
    # A standard deviation of 13.7.
    assert all(abs(counts[prompt_id] - 250) < 55 for prompt_id in IDS)


def test_a_draw_contains_every_prompt_once_and_depends_on_seed_step_and_spreads() -> None:
    ids = [str(row) for row in range(50)]
    spreads = dict.fromkeys(ids, 0.1)

    def drawn(spreads: dict[str, float], step: int = 1, seed: int = 0) -> list[int]:
        return draw_order(ids, spreads, range(50), step=step, seed=seed)

    order = drawn(spreads)
    assert sorted(order) == [*range(50)]
    # As a checkpoint may store it.
    assert drawn(dict(reversed(spreads.items()))) == order
    assert order not in (drawn(spreads, step=2), drawn(spreads, seed=1))
    # More spread moves one prompt forward and leaves the order of the others.
    last = order[-1]
    moved = drawn(spreads | {ids[last]: 1e6})
    assert moved.index(last) < 10
    assert [row for row in moved if row != last] == order[:-1]


def test_metrics_say_what_a_draw_chooses_from() -> None:
    found = sampling_metrics((*IDS, *"efgh"), SPREADS)
    assert found["prompts/seen_fraction"] == 0.5
    # 1 / (0.390625 + 0.0625 + 2 * 0.00390625)
    assert found["prompts/effective_number"] == pytest.approx(2.1695, abs=1e-4)
    even = sampling_metrics(IDS, dict.fromkeys(IDS, 0.0))
    assert even["prompts/effective_number"] == pytest.approx(4)
    assert math.isnan(sampling_metrics(IDS, {})["prompts/effective_number"])
