"""Terms compare with a target, or with the source of an edit where they are asked to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rewards.base import Reward, TermConfig, has_needs, stack_compared
from rewards.build import build_reward
from rewards.config import RewardConfig
from rewards.types import Prompt

KINDS = {"psnr": {}, "ssim": {}, "lpips": {"network": "squeeze", "pretrained": False}}


def plain(value: int) -> torch.Tensor:
    return torch.full((3, 64, 64), value, dtype=torch.uint8)


EDIT = Prompt("edit", "make it darker", target=plain(40), sources=(plain(200), plain(10)))


def term(kind: str, **options: object) -> TermConfig:
    section = {"weight": 1.0, **KINDS[kind], **options}
    return RewardConfig.model_validate({"terms": {kind: section}}).terms[kind]


def build(kind: str, **options: object) -> Reward:
    return build_reward(term(kind, **options), torch.device("cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_term_compares_with_the_image_it_is_told_to(kind: str) -> None:
    pixels = torch.stack([EDIT.target, EDIT.sources[0]])
    pixels[:, :, ::7] = 128  # untrained features of plain images tell nothing
    edit = replace(EDIT, target=pixels[0].clone(), sources=(pixels[1].clone(), EDIT.sources[1]))
    by_target, by_source = build(kind), build(kind, against="source")
    near_target = by_target.score([edit] * 2, pixels)
    near_source = by_source.score([edit] * 2, pixels)
    assert near_target[1] < near_target[0] == pytest.approx(1.0)
    # The first source, not the second.
    assert near_source[0] < near_source[1] == pytest.approx(1.0)

    without_target, without_source = replace(edit, target=None), replace(edit, sources=())
    assert [by_target.applies_to(each) for each in (without_target, without_source)] == [
        False,
        True,
    ]
    assert [by_source.applies_to(each) for each in (without_target, without_source)] == [
        True,
        False,
    ]


def test_what_a_term_against_the_source_needs() -> None:
    assert term("psnr", against="source").needs() == ("source",)
    assert term("psnr").needs() == ("target",)
    assert has_needs(EDIT, ["source", "target"])
    assert not has_needs(replace(EDIT, sources=()), ["source"])


def test_images_to_compare_with_are_there_and_of_the_same_size() -> None:
    small = torch.zeros(1, 3, 32, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="target of prompt edit is missing"):
        stack_compared([replace(EDIT, target=None)], small)
    with pytest.raises(ValueError, match="prompt edit is 64 x 64, the image 64 x 32"):
        stack_compared([EDIT], small, "source")
