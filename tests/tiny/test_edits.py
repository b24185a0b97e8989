"""Edits of the embedded world: what they change, how careless ones fail, and what is exact."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from glm_grpo.errors import DataError
from glm_grpo.tiny import edits, world
from glm_grpo.tiny.prompts import tiny_prompts
from glm_grpo.tiny.scoring import exact
from rewards.types import Prompt

SIZE = {"height": world.SIZE, "width": world.SIZE, "sources": 1}
CHANGED = {"word": "word", "colours": "colours", "shape": "shape", "place": "is_word_above"}


@pytest.mark.parametrize("kind", edits.KINDS)
def test_an_edit_changes_what_its_kind_says_and_nothing_else(kind: str) -> None:
    rng = np.random.default_rng(0)
    for sign in world.signs_of_words(world.HELD_OUT_WORDS[:8], seed=1):
        edit = edits.edit_of(sign, kind, rng)
        field = CHANGED[kind]
        assert getattr(edit.before, field) != getattr(edit.after, field)
        assert replace(edit.before, **{field: getattr(sign, field)}) == edit.after == sign


def test_an_instruction_is_known_by_its_form() -> None:
    assert all(map(edits.is_instruction, tiny_prompts("edit-train", **SIZE).captions()))
    for unknown in ('write instead "open"', "make it a hexagon", "move the word", "make it round!"):
        assert not edits.is_instruction(unknown)


def test_careless_edits_go_wrong_as_often_as_asked_and_keep_the_rest() -> None:
    rng = np.random.default_rng(0)
    wrong: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for _ in range(800):
        edit = edits.random_edit(rng)
        made = edits.careless(edit, rng, letter_rate=0.2, rate=0.4)
        field = CHANGED[edit.kind]
        assert replace(made, **{field: getattr(edit.after, field)}) == edit.after
        assert made.word not in world.HELD_OUT_WORDS
        wrong[edit.kind] += made != edit.after
        total[edit.kind] += 1
    for kind in ("colours", "shape", "place"):
        assert wrong[kind] / total[kind] == pytest.approx(0.4, abs=0.08)
    assert 0.3 < wrong["word"] / total["word"] < 0.6


def test_prompts_of_edits_have_a_source_a_target_and_two_kinds_a_word() -> None:
    prompts = tiny_prompts("edit-heldout", **SIZE)
    assert len(prompts) == 2 * len(world.HELD_OUT_WORDS)
    kinds = Counter(change.kind for change in prompts.changes)
    assert max(kinds.values()) - min(kinds.values()) <= 2
    assert len({prompts[index].prompt_id for index in range(len(prompts))}) == len(prompts)
    first = prompts[0]
    assert first.prompt == prompts.captions()[0]
    assert torch.equal(first.sources[0], world.draw_sign(prompts.changes[0].before))
    assert first.target is not None
    assert torch.equal(first.target, world.draw_sign(prompts.changes[0].after))
    trained = {change.after.word for change in tiny_prompts("edit-train", **SIZE).changes}
    assert trained.isdisjoint(world.HELD_OUT_WORDS)


@pytest.mark.parametrize(
    ("name", "sources", "remedy"),
    [
        ("edit-train", 0, "set data.sources=1"),
        ("train", 1, "set data.sources=0"),
        ("edits", 1, "the sets are"),
    ],
)
def test_another_number_of_sources_or_name_is_refused(name: str, sources: int, remedy: str) -> None:
    with pytest.raises(DataError, match=remedy):
        tiny_prompts(name, height=world.SIZE, width=world.SIZE, sources=sources)


def test_exact_counts_cells_and_neither_noise_nor_blur() -> None:
    sign = world.Sign(word="OPEN", shape="circle", colours=0, is_word_above=True)
    target = world.draw_sign(sign)
    noisy = (target.int() + torch.randint(-9, 10, target.shape)).clamp(0, 255).to(torch.uint8)
    others = [
        world.draw_sign(replace(sign, **change))
        for change in ({"word": "OPEM"}, {"colours": 1}, {"shape": "square"})
    ]
    prompts = [Prompt("sign", "-", target=target)] * 5
    scores = exact(prompts, torch.stack([target, noisy, *others]))
    assert scores.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
