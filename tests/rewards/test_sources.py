"""Terms compare with a source picture where they are asked to, in this process and in others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rewards.base import has_needs
from rewards.build import build_reward
from rewards.config import RewardConfig
from rewards.process import ProcessReward
from rewards.remote import messages
from rewards.score import Scorer, Term
from rewards.types import Prompt

CPU = torch.device("cpu")


def plain(value: int) -> torch.Tensor:
    return torch.full((3, 64, 64), value, dtype=torch.uint8)


EDIT = Prompt("edit", "make it darker", target=plain(40), sources=(plain(200), plain(10)))


def term(kind: str, **options: object):
    section = {"weight": 1.0, **options}
    config = RewardConfig.model_validate({"terms": {kind: section}, "allow_untied": True})
    return config.terms[kind]


@pytest.mark.parametrize("kind", ["psnr", "ssim", "lpips"])
def test_a_term_prefers_the_picture_it_compares_with(kind: str) -> None:
    options = {"pretrained": False} if kind == "lpips" else {}
    pixels = torch.stack([EDIT.target, EDIT.sources[0]])
    pixels[:, :, ::7] = 128  # untrained features of plain pictures tell nothing
    edit = replace(EDIT, target=pixels[0].clone(), sources=(pixels[1].clone(), EDIT.sources[1]))
    against_target = build_reward(term(kind, **options), CPU).score([edit] * 2, pixels)
    against_source = build_reward(term(kind, against="source", **options), CPU).score(
        [edit] * 2, pixels
    )
    assert against_target[0] > against_target[1]
    assert against_source[1] > against_source[0]
    assert against_target[0] == pytest.approx(1.0)
    # The first source, not the second.
    assert against_source[1] == pytest.approx(1.0)


@pytest.mark.parametrize("kind", ["psnr", "ssim"])
def test_a_term_against_the_source_applies_to_edits_alone(kind: str) -> None:
    reward = build_reward(term(kind, against="source"), CPU)
    assert reward.applies_to(EDIT)
    assert reward.applies_to(replace(EDIT, target=None))
    assert not reward.applies_to(replace(EDIT, sources=()))
    with pytest.raises(ValueError, match="prompt edit has no source picture to compare with"):
        reward.score([replace(EDIT, sources=())], plain(0)[None])
    with pytest.raises(ValueError, match="source of prompt edit is 64 x 64, the picture 32 x 32"):
        reward.score([EDIT], plain(0)[None, :, :32, :32])


def test_what_a_term_against_the_source_needs() -> None:
    assert term("psnr", against="source").needs() == ("source",)
    assert term("psnr").needs() == ("target",)
    assert has_needs(EDIT, ["source", "target"])
    assert not has_needs(replace(EDIT, sources=()), ["source"])


def test_sources_reach_a_term_in_a_process_of_its_own() -> None:
    config = term("psnr", against="source", run_in="process")
    reward = ProcessReward(config, name="psnr", device=CPU)
    table = Scorer([Term("psnr", reward, 1.0)]).score(
        [EDIT], torch.stack([plain(200), plain(40)])[None]
    )
    reward.close()
    assert table.raw[0, 0, 0] == 1.0
    assert table.raw[0, 1, 0] < 0.5


def test_sources_are_sent_to_a_scorer_that_asks_for_them() -> None:
    pixels = torch.stack([plain(1), plain(2)])
    sent = {"has_targets": False, "has_sources": True}
    prompts, _ = messages.decode_request(messages.encode_request([EDIT] * 2, pixels, **sent))
    assert prompts[0] is prompts[1]
    assert prompts[0].target is None
    assert [source[0, 0, 0].item() for source in prompts[0].sources] == [200, 10]
    prompts, _ = messages.decode_request(
        messages.encode_request([EDIT] * 2, pixels, has_targets=True)
    )
    assert prompts[0].sources == ()


def test_pixels_of_sources_count() -> None:
    body = messages.encode_request([EDIT], plain(0)[None], has_targets=False, has_sources=True)
    pixels = 3 * 64 * 64
    messages.decode_request(body, most_pixels=pixels)
    with pytest.raises(messages.MessageError, match=f"pictures of {pixels} pixels together"):
        messages.decode_request(body, most_pixels=pixels - 1)
