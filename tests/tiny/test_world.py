"""The synthetic world: what it draws, says, and keeps apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glm_grpo.errors import ConfigError
from glm_grpo.tiny import world
from glm_grpo.tiny.prompts import tiny_prompts


def test_held_out_words_are_never_seen_before():
    rng = np.random.default_rng(0)
    seen = {world.random_sign(rng).word for _ in range(4000)} | set(world.TRAINING_WORDS)

    assert not seen & set(world.HELD_OUT_WORDS)
    assert {len(word) for word in world.HELD_OUT_WORDS + world.TRAINING_WORDS} == {3, 4}


def test_caption_quotes_the_word_and_names_shape_place_and_colours():
    sign = world.Sign("KITE", "circle", colours=0, is_word_above=False)

    assert world.caption(sign) == 'white on red: a circle above the word "KITE"'


def test_a_caption_is_known_by_its_form():
    assert all(map(world.is_caption, tiny_prompts("train", height=128, width=128).captions()))
    known = 'white on red: a circle above the word "KITE"'
    assert world.is_caption(known)
    for old, new in (
        ("white on red", "red on green"),
        ("circle", "cat"),
        ("above", "beside"),
        ("KITE", "kite"),
        ("KITE", "KITES"),
        ("KITE", "GO"),
        (":", ""),
        ('"KITE"', '"KITE", please'),
    ):
        assert not world.is_caption(known.replace(old, new))


def test_sign_cells_put_word_and_shape_where_the_caption_says():
    above = world.sign_cells(world.Sign("CAB", "square", colours=0, is_word_above=True))
    blank, square = world.BLANK, 26 + 4

    assert above.tolist() == [
        [blank] * 4,
        [2, 0, 1, blank],
        [blank, square, square + 1, blank],
        [blank, square + 2, square + 3, blank],
    ]
    other = world.sign_cells(world.Sign("CAB", "square", colours=3, is_word_above=True))
    assert torch.equal(other, above + 3 * world.KINDS)


def test_drawn_cells_stand_where_the_grid_says():
    cells = torch.tensor([[0, 1], [2, 3]])

    image = world.draw_cells(cells)

    atlas = world.cell_atlas()
    assert image.shape == (3, 64, 64)
    assert torch.equal(image[:, :32, 32:], atlas[1])
    assert torch.equal(image[:, 32:, :32], atlas[2])


def test_confusing_replaces_letters_at_the_stated_rate():
    rng = np.random.default_rng(2)
    sign = world.Sign("ABCD", "circle", 0, is_word_above=True)
    words = [world.confuse(sign, rng, letter_rate=0.5, other_rate=0.0).word for _ in range(4000)]

    changed = np.mean([a != b for word in words for a, b in zip(word, sign.word, strict=True)])
    # A random letter is the old one in one case of 26: 0.5 * 25 / 26 = 0.481.
    assert abs(changed - 0.481) < 0.02


def test_words_that_do_not_fit_on_a_sign_are_refused_together():
    with pytest.raises(ConfigError, match="'NOISE', 'flux': .* 3 or 4 capital letters"):
        world.signs_of_words(("KITE", "NOISE", "flux"), seed=0)


def test_tiny_prompts_have_text_and_target_and_a_fixed_order():
    prompts = tiny_prompts("heldout", height=128, width=128)

    assert [prompts[i].texts for i in range(len(prompts))] == [
        (word,) for word in world.HELD_OUT_WORDS
    ]
    assert prompts[0].target is not None
    assert torch.equal(prompts[0].target, world.draw_sign(prompts.signs[0]))
