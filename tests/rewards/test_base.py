from __future__ import annotations

import pytest
import torch

from rewards.base import has_needs
from rewards.terms_config import Need
from rewards.types import Prompt

TARGET = torch.zeros(3, 2, 2, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (Prompt("a", "a"), {"prompt"}),
        (Prompt("a", "a", texts=("", " ")), {"prompt"}),
        (Prompt("a", "a", texts=("", "A")), {"prompt", "text"}),
        (Prompt("a", "a", target=TARGET), {"prompt", "target"}),
    ],
)
def test_has_needs_asks_for_every_need(prompt: Prompt, expected: set[Need]) -> None:
    met = {need for need in ("prompt", "text", "target") if has_needs(prompt, (need,))}
    assert met == expected
    assert has_needs(prompt, ())
    assert not has_needs(prompt, ("prompt", "text", "target"))
