from __future__ import annotations

import pytest

from glm_grpo.output import counted


@pytest.mark.parametrize(
    ("number", "shown"), [(0, "0 images"), (1, "1 image"), (2, "2 images"), (1200, "1,200 images")]
)
def test_counted_has_the_noun_in_its_number(number: int, shown: str) -> None:
    assert counted(number, "image") == shown
