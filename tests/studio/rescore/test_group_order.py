from __future__ import annotations

import pytest
import torch
from scipy.stats import kendalltau

from glm_grpo.studio.rescore.rescore import kendall_taus, winner_changes


def test_kendall_taus_equal_those_of_scipy() -> None:
    generator = torch.Generator().manual_seed(0)
    # Whole numbers from 0 to 3 among 7 images: ties in every group.
    before = torch.randint(4, (200, 7), generator=generator).float()
    after = torch.randint(4, (200, 7), generator=generator).float()
    expected = [kendalltau(*pair).statistic for pair in zip(before, after, strict=True)]
    torch.testing.assert_close(kendall_taus(before, after), torch.tensor(expected).float())


def test_kendall_taus_are_not_defined_in_a_zero_std_group() -> None:
    # No spread before, none but rounding after, none in both; then upside down.
    nearly = 0.7 + 1e-7 * torch.arange(3.0)
    before = torch.stack([torch.ones(3), torch.arange(3.0), torch.ones(3), torch.arange(3.0)])
    after = torch.stack([torch.arange(3.0), nearly, torch.zeros(3), -torch.arange(3.0)])
    correlations = kendall_taus(before, after)
    assert correlations.isnan().tolist() == [True, True, True, False]
    assert correlations[3] == -1


@pytest.mark.parametrize(
    ("before", "after", "is_changed"),
    [
        ((1, 2, 0), (1, 3, 0), False),
        ((1, 2, 0), (3, 2, 0), True),
        # The winner is among the best, if not alone.
        ((1, 2, 0), (2, 2, 0), False),
        # One of two winners stays.
        ((2, 2, 0), (1, 2, 0), False),
        # Neither of two stays.
        ((2, 2, 0), (1, 1, 3), True),
        # No one won before.
        ((1, 1, 1), (0, 0, 1), False),
        # Within rounding of the best.
        ((1.0000001, 1, 0), (0.5, 1, 0), False),
        ((-1, -2, -3), (-3, -2, -1), True),
    ],
)
def test_winner_changes_only_where_no_best_image_stays(
    before: tuple[float, ...], after: tuple[float, ...], *, is_changed: bool
) -> None:
    changes = winner_changes(torch.tensor([before]).float(), torch.tensor([after]).float())
    assert changes.tolist() == [is_changed]
