"""The share of the variance that previews make."""

from __future__ import annotations

import math

import pytest
import torch

from glm_grpo.probe.branches import preview_share


def test_the_share_of_a_small_table_is_that_computed_by_hand():
    # Means of previews 2 and 6, of all 4: MSB = 2 * (4 + 4) / 1 = 16; MSW = (2 + 8) / 2 = 5.
    scores = torch.tensor([[[1.0, 3.0], [4.0, 8.0]]], dtype=torch.float64)
    found = preview_share(scores)
    assert found.share == pytest.approx((16 - 5) / (16 + 5))
    assert math.isnan(found.low)
