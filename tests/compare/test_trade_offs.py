from __future__ import annotations

import torch

from glm_grpo.compare.comparison import pareto_optimal


def test_pareto_optimal_keeps_what_no_other_point_beats() -> None:
    # (2, 2) beats (1, 2) and (1, 1); (0, 3) is higher in the second; (2, 2) twice beats neither.
    points = torch.tensor([[2, 2], [1, 2], [1, 1], [0, 3], [2, 2]], dtype=torch.float64)
    assert pareto_optimal(points).tolist() == [True, False, False, True, True]
