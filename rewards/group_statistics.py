"""Statistics of groups over their scored images; NaN stands for an image that was not scored."""

from __future__ import annotations

from jaxtyping import Float, Float64
from torch import Tensor


def group_means(values: Float[Tensor, "P G *rest"]) -> Float[Tensor, "P 1 *rest"]:
    """Mean of each group; NaN if no image of it was scored."""
    return group_sums(values) / _counts(values)


def group_sums(values: Float[Tensor, "P G *rest"]) -> Float[Tensor, "P 1 *rest"]:
    """Sum over each group; 0 if no image of it was scored."""
    return values.masked_fill(values.isnan(), 0.0).sum(dim=1, keepdim=True)


def group_variances(values: Float64[Tensor, "P G *rest"]) -> Float64[Tensor, "P 1 *rest"]:
    """Sample variance (divided by n - 1) of each group; 0 with fewer than two scored images."""
    return group_sums(centre(values).square()) / (_counts(values) - 1).clamp(min=1)


def centre(values: Float64[Tensor, "P G *rest"]) -> Float64[Tensor, "P G *rest"]:
    """Values less the mean of their group; NaN stays."""
    return values - group_means(values)


def _counts(values: Float[Tensor, "P G *rest"]) -> Tensor:
    return (~values.isnan()).sum(dim=1, keepdim=True)
