"""Compute group-relative advantages: how much better an image is than others of its prompt."""

from __future__ import annotations

import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from glm_grpo.types import Normalization
from rewards.group_statistics import centre
from rewards.weighting import is_zero_std


def group_advantages(
    rewards: Float32[Tensor, "P G"],
    *,
    normalization: Normalization,
    std_floor: float,
    clip: float | None,
) -> Float32[Tensor, "P G"]:
    """Centre the rewards of each prompt's group and scale them.

    With c = r - mean_G(r):

    - `group_std`: c / max(std_G(r), std_floor).
      Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2.
    - `mean_only`: c. Source: Dr. GRPO (arXiv 2503.20783), section 3.2: dividing by the group's
      std gives prompts that are nearly solved, or nearly hopeless, undue weight.
    - `batch_std`: c / max(std_PG(c), std_floor), one std over all P * G centred rewards.
        Source: REINFORCE++ with baseline (arXiv 2501.03262). TRL's `scale_rewards="batch"` divides
        by the std of the uncentred rewards, which differences between prompts increase: 1.07 to
        1.15 times ours in its comparison with this code, more if prompts differ more.

    The std is the sample std (divided by n - 1), as in TRL's `GRPOTrainer`; the papers do not
    specify it. The floor replaces the usual epsilon: a group with a smaller std is not scaled up to
    unit variance, so that the noise of nearly equal images stays small.

    `clip` scales a whole group down until its largest |advantage| equals `clip`. Clamping single
    elements would break the zero sum, and centring again would break the bound.

    An image whose reward is NaN is left out of its group: it takes no part in any mean or std, and
    its advantage is 0.

    Args:
        rewards: Totals, higher is better, G >= 2; NaN for images that are left out of their group,
            else finite.
        normalization: One of the three above.
        std_floor: Smallest divisor, in reward units, >= 0; `mean_only` ignores it.
        clip: Largest |advantage|, > 0; None: no bound.

    Returns:
        Advantages with a zero sum in every group, exactly 0 in groups whose rewards are equal to
        within `rewards.weighting.ZERO_STD_TOLERANCE`, and where fewer than two are left.

    Raises:
        ValueError: A reward is infinite (the message names prompt row and image), the group has
            fewer than two images, or `std_floor` or `clip` is out of range.
    """
    _check_arguments(rewards, std_floor=std_floor, clip=clip)
    centred = centred_rewards(rewards)
    values = without_left_out(centred / divisor(centred, normalization, std_floor))
    return bounded(values, clip).float()


def centred_rewards(rewards: Float32[Tensor, "P G"]) -> Float64[Tensor, "P G"]:
    """Rewards less the mean of their group; exactly 0 in zero-std groups, NaN where left out."""
    # float64 keeps the sum of a group at zero to the last bit of the float32 result.
    centred = centre(rewards.double())
    return centred.masked_fill(is_zero_std(rewards)[:, None] & ~rewards.isnan(), 0.0)


def without_left_out(values: Float64[Tensor, "P G *T"]) -> Float64[Tensor, "P G *T"]:
    """The same with 0 for images that are left out of their group (NaN)."""
    return values.masked_fill(values.isnan(), 0.0)


def bounded(values: Float64[Tensor, "P G *T"], clip: float | None) -> Float64[Tensor, "P G *T"]:
    """Advantages, each group (at each token) scaled down until the largest one equals `clip`."""
    if clip is None:
        return values
    largest = values.abs().amax(dim=1, keepdim=True)
    return values * (clip / largest.clamp(min=clip))


def divisor(
    centred: Float64[Tensor, "P G"], normalization: Normalization, std_floor: float
) -> Float64[Tensor, "rows 1"]:
    """What centred rewards are divided by; see `group_advantages`."""
    if normalization == "mean_only":
        return centred.new_ones(1, 1)
    groups = centred if normalization == "group_std" else centred.reshape(1, -1)
    std = torch.stack([_std(group[~group.isnan()]) for group in groups])[:, None]
    # A std of 0 only occurs if every centred reward is 0, and any divisor keeps them at 0.
    return std.clamp(min=std_floor).masked_fill(std == 0, 1.0)


def _std(values: Float64[Tensor, " n"]) -> Float64[Tensor, ""]:
    return values.std() if len(values) > 1 else values.new_zeros(())


def _check_arguments(
    rewards: Float32[Tensor, "P G"], *, std_floor: float, clip: float | None
) -> None:
    if rewards.shape[1] < 2:
        raise ValueError(
            f"group size {rewards.shape[1]}: an advantage compares the images of one prompt, "
            "so sample at least 2 per prompt"
        )
    if not std_floor >= 0:
        raise ValueError(f"std_floor {std_floor}: must be 0 or more; 1e-4 is a usual choice")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip {clip}: must be above 0; use None for no bound")
    for row, image in rewards.isinf().nonzero().tolist():
        raise ValueError(
            f"reward {rewards[row, image].item()} at prompt row {row}, image {image}: rewards "
            "must be finite, or NaN for an image that is left out of its group"
        )
