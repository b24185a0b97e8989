"""Compute totals, and each term's contribution to them, from raw scores and weights.

Training calls these functions, and so does everything that tries other weights afterwards: they
are pure functions of the stored table and need neither a model nor the images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from jaxtyping import Bool, Float32, Float64
from torch import Tensor

from rewards.group_statistics import centre, group_means, group_sums, group_variances
from rewards.score_map import Grid
from rewards.types import RewardError, RewardTable

Mode = Literal["weighted_sum", "normalize_then_sum"]

ZERO_STD_TOLERANCE = 8 * torch.finfo(torch.float32).eps
"""Largest spread of a zero-std group, relative to its largest |score|.

Equal images get equal scores except for the last bits: a batched term, and the weighted sum of a
handful of terms, each round once to fp32. Eight units of rounding cover that, and are five orders
of magnitude below any meaningful difference of scores.
"""


def combine(
    table: RewardTable, *, mode: Mode, base_scores: RewardTable | None = None
) -> Float32[Tensor, "P G"]:
    """Total reward of every image: the sum of `contributions` over the terms.

    NaN for images that are left out of their group, see `is_left_out`.

    Args:
        base_scores: See `contributions`; given for evaluations, whose totals are compared across
            steps.
    """
    totals = contributions(table, mode=mode, base_scores=base_scores).sum(dim=-1)
    for row, image in (~totals.isfinite() & ~is_left_out(table)).nonzero().tolist():
        scores = zip(
            table.names, table.raw[row, image].tolist(), table.weights.tolist(), strict=True
        )
        listed = ", ".join(
            f"{name} {score:g} (weight {weight:g})" for name, score, weight in scores
        )
        raise RewardError(
            f"the total of prompt row {row}, image {image} is {totals[row, image].item()}, though "
            f"every score is finite: {listed}; lower reward.terms.<name>.weight, or make the "
            "scores smaller"
        )
    return totals


def is_left_out(table: RewardTable) -> Bool[Tensor, "P G"]:
    """Whether an image is left out of its group, because a term with a weight refused it."""
    return (table.is_refused() & (table.weights != 0)).any(dim=-1)


def contributions(
    table: RewardTable, *, mode: Mode, base_scores: RewardTable | None = None
) -> Float32[Tensor, "P G R"]:
    """Contribution of each term to each image's total; exactly 0 if a term does not apply.

    All are NaN for an image that is left out of its group (`is_left_out`), which takes no part in
    any mean or std: with the other terms alone, its total could not be compared with those of its
    group.

    With weights w, scores s, and A the terms that apply to a prompt:

        contribution_r = w_r x_r * (sum over all |w|) / (sum over A of |w|)

    - `weighted_sum`: x = s.
    - `normalize_then_sum`: x = (s - mean_G(s)) / max(std_G(s), std_floor of the term), and 0 in a
      group whose scores are all equal; the std is the sample std. Each term then counts only by
      its weight, however small its spread. Source: GDPO (arXiv 2601.05242), section 3; TRL's
      `multi_objective_aggregation="normalize_then_sum"`.
      With `base_scores`, mean and std are instead those of the base model's scores, over all
      images of the prompts to which the term applies: x = (s - mean_0) / max(std_0, std_floor).
      Within a group, the mean is 0 at every step. This scale, in contrast, is fixed: a policy that
      scores higher has higher totals, and a group may consist of a single image.

    The factor is exactly 1 if every term applies, which gives the plain weighted sum. Otherwise the
    weight of the missing terms is distributed to the others in proportion, so that a total keeps
    its scale: a prompt without a target is not worth less than one with a target, and an advantage
    that is divided by a std of the batch, or not at all, treats both alike. |w| is used because a
    negative weight is a penalty and must not cancel the scale of the others.

    Args:
        base_scores: Raw scores of the base model by the same terms; ignored by `weighted_sum`.
    """
    scores = table.raw
    if mode != "weighted_sum" and base_scores is not None:
        scores = _standardise_by(base_scores, table)
    elif mode == "normalize_then_sum":
        scores = _standardise(table)
    # Filled, not multiplied by 0: a caller's table may contain NaN where a term does not apply, and
    # a term without weight may have refused an image.
    is_unused = ~table.is_applicable[:, None, :] | (table.is_refused() & (table.weights == 0))
    used_scores = scores.masked_fill(is_unused, 0.0)
    found = table.weights * used_scores * _scale(table)[:, None, None]
    return found.masked_fill(is_left_out(table)[:, :, None], torch.nan)


def in_group_stds(
    scores: Float32[Tensor, "P K R"] | Float64[Tensor, "P K R"], table: RewardTable
) -> Float32[Tensor, "P K R"]:
    """Scores of the same prompts in stds of the table's groups, not below the term's floor.

    0 in a group whose scores are all equal. Not centred: the variance of these scores has the unit
    of the variance inside groups under `normalize_then_sum`.
    """
    is_equal = is_zero_std(_kept(table))[:, None, :]
    return (scores.double() / _group_divisors(table)).masked_fill(is_equal, 0.0).float()


def placed_contributions(
    table: RewardTable, grid: Grid, *, mode: Mode
) -> Float64[Tensor, "P G R K"]:
    """What each place of each image contributes to its total, by term, in comparison with others.

    A map, or a box without a kind, is compared with the mean of its group at the same place; a box
    with a kind with the boxes of that kind in the group (`like_with_like`). Either way, the values
    of a group add up to 0. 0 for terms without a score map, NaN for images that are left out of
    their group. K is the number of places, row by row.

    Score maps are weighted, and under `normalize_then_sum` standardised, as the scores are in
    `contributions`: up to rounding, and less its mean in the group, a term's contribution is the
    sum of the places and of what has none.
    """
    is_missing = is_left_out(table)[:, :, None, None]
    by_place, by_kind = (
        _by_term(table, found, grid).masked_fill(is_missing, torch.nan)
        for found in (table.score_map, table.kind_map)
    )
    placed = centre(by_place) + by_kind
    is_counted = table.is_applicable
    if mode == "normalize_then_sum":
        placed = placed / _group_divisors(table)[..., None]
        is_counted = is_counted & ~is_zero_std(_kept(table))
    placed = placed.masked_fill(~is_counted[:, None, :, None], 0.0)
    scale = table.weights.double() * _scale(table).double()[:, None]
    return (placed * scale[:, None, :, None]).masked_fill(is_missing, torch.nan)


def advantage_shares(table: RewardTable, *, mode: Mode) -> Float32[Tensor, " R"]:
    """Each term's share of the variance within groups.

    With c_r the contribution of term r and total = sum_r c_r, inside each group:

        share_r = cov_G(c_r, total) / var_G(total)

    averaged over the groups whose totals differ. This is the exact decomposition of the
    variance of a sum: shares add up to 1. A share is negative if a term pulls against the total,
    and above 1 if others pull against it. Weights do not show this: a term with a large weight and
    no spread has a share of 0.

    Returns:
        One share per term; all 0 if every group is a zero-std group.
    """
    parts = contributions(table, mode=mode)
    # In float32, rounding errors would exceed small covariances.
    exact = parts.double()
    total = exact.sum(dim=-1)
    is_varied = ~is_zero_std(total.float())
    if not is_varied.any():
        return torch.zeros_like(table.weights)
    centred_parts, centred_total = centre(exact[is_varied]), centre(total[is_varied])
    covariance = group_means(centred_parts * centred_total[..., None])[:, 0]
    variance = group_means(centred_total.square())
    return (covariance / variance).mean(dim=0).float()


def placed_share(table: RewardTable, *, mode: Mode) -> float:
    """Share of the variance within groups that has a place; see `advantage_shares`.

    The rest belongs to whole images: terms without a score map, and what a map leaves out.
    """
    total = contributions(table, mode=mode).double().sum(dim=-1)
    is_varied = ~is_zero_std(total.float())
    if not table.score_map or not is_varied.any():
        return 0.0
    rows, columns = next(iter(table.score_map.values())).shape[2:]
    placed = placed_contributions(table, Grid(rows, columns), mode=mode)
    of_images = placed.sum(dim=(2, 3))[is_varied]
    centred = centre(total)[is_varied]
    return (group_sums(of_images * centred) / group_sums(centred.square())).mean().item()


def is_zero_std(scores: Float32[Tensor, "P G *R"]) -> Bool[Tensor, " P *R"]:
    """Whether all images of a group have the same score, to within `ZERO_STD_TOLERANCE`.

    Images without a score (NaN) do not count: a group with fewer than two others counts, too.
    """
    is_missing = scores.isnan()
    highest = scores.masked_fill(is_missing, -torch.inf).amax(dim=1)
    lowest = scores.masked_fill(is_missing, torch.inf).amin(dim=1)
    largest = scores.abs().masked_fill(is_missing, 0.0).amax(dim=1)
    return highest - lowest <= ZERO_STD_TOLERANCE * largest


def _by_term(
    table: RewardTable, maps: Mapping[str, Float32[Tensor, "P G h w"]], grid: Grid
) -> Float64[Tensor, "P G R K"]:
    placed = torch.zeros(*table.raw.shape, len(grid), dtype=torch.float64)
    for name, found in maps.items():
        placed[:, :, table.names.index(name)] = found.flatten(-2).double()
    return placed


def _kept(table: RewardTable) -> Float32[Tensor, "P G R"]:
    """Raw scores; NaN by all terms for images that are left out of their group."""
    return table.raw.masked_fill(is_left_out(table)[:, :, None], torch.nan)


def _standardise(table: RewardTable) -> Float32[Tensor, "P G R"]:
    return in_group_stds(centre(_kept(table).double()), table)


def _group_divisors(table: RewardTable) -> Float64[Tensor, "P 1 R"]:
    """Standard deviation of each term in each group, not below the term's floor."""
    size, floors = table.raw.shape[1], table.std_floors.double()
    if size < 2:
        raise ValueError(
            f"group size {size}: normalize_then_sum compares the images of one prompt; "
            "sample at least 2 per prompt, or use weighted_sum"
        )
    return group_variances(_kept(table).double()).sqrt().clamp(min=floors)


def _standardise_by(base_scores: RewardTable, table: RewardTable) -> Float32[Tensor, "P G R"]:
    # One row per image: the sums do not depend on how images are grouped.
    raw = base_scores.raw.double().flatten(0, 1)
    applies = base_scores.is_applicable.repeat_interleave(base_scores.raw.shape[1], dim=0)
    applies &= ~raw.isnan()
    counts = applies.sum(dim=0)
    is_weighed = table.is_applicable.any(dim=0) & (table.weights != 0)
    for column in (is_weighed & (counts == 0)).nonzero().flatten().tolist():
        raise RewardError(
            f"term {table.names[column]} applies to held-out prompts now, but scored no image in "
            "the evaluation of the base model, whose spread scales the totals; restore the "
            "held-out prompts, or start a new run with a scorer that does not refuse all images"
        )
    means = raw.masked_fill(~applies, 0.0).sum(dim=0) / counts.clamp(min=1)
    squares = (raw - means).masked_fill(~applies, 0.0).square().sum(dim=0)
    stds = (squares / (counts - 1).clamp(min=1)).sqrt()
    return ((table.raw.double() - means) / stds.clamp(min=table.std_floors.double())).float()


def _scale(table: RewardTable) -> Float32[Tensor, " P"]:
    # Not a view of one row, which torch sums up in another order.
    sizes = table.weights.abs().repeat(len(table.is_applicable), 1)
    applicable = (sizes * table.is_applicable).sum(dim=-1)
    for row in (applicable == 0).nonzero().flatten().tolist():
        raise ValueError(
            f"prompt row {row} has no total: of the terms {', '.join(table.names)} none that "
            "applies to it has a weight other than 0; give it a target or a text, or weigh a term "
            "that applies to every prompt"
        )
    # Both sums run over the same R numbers, so the quotient is exactly 1 if all terms apply.
    return sizes.sum(dim=-1) / applicable
