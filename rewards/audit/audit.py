"""Audit of the terms of a reward, each alone and together, from a table of raw scores.

Inside a group means: among the G images of one prompt, which is all that an advantage compares.
Prompts to which a term does not apply take no part in any figure of that term; NaN stands for what
has no value, such as the mean of a term that applies to no prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from rewards.reweigh import FLAT_TOLERANCE, Mode, advantage_shares, combine, is_flat
from rewards.types import RewardTable

CONFLICT_THRESHOLD = -0.3
"""Correlation inside groups below which two terms are said to be in conflict."""


@dataclass(frozen=True)
class TermAudit:
    """Figures of one term, in units of its raw score where nothing else is said.

    Attributes:
        mean: Over all images.
        std: Over all images, of the population.
        std_within: Root of the mean over groups of the variance (of the population) inside a
            group: the part of `std` that training sees.
        flat_fraction: Share of groups whose images all score the same, see `reweigh.is_flat`; 0..1.
        advantage_share: See `reweigh.advantage_shares`; the shares of all terms add up to 1.
        headroom: See `headroom`.
        saturation: See `saturation`; 0..1.
    """

    name: str
    mean: float
    std: float
    std_within: float
    flat_fraction: float
    advantage_share: float
    headroom: float
    saturation: float


@dataclass(frozen=True)
class RewardAudit:
    """Figures of a whole reward.

    Attributes:
        terms: One for each term, in the order of the table.
        correlations: See `correlations`.
        headroom: Of the total reward, see `headroom`.
    """

    terms: tuple[TermAudit, ...]
    correlations: Float64[Tensor, "R R"]
    headroom: float


@dataclass(frozen=True)
class Conflict:
    """Two terms that pull against each other.

    Attributes:
        first: Name of the term that comes first in the table.
        second: Name of the other.
        correlation: Of the weighted scores inside groups, -1..0.
    """

    first: str
    second: str
    correlation: float


def audit_table(table: RewardTable, *, mode: Mode) -> RewardAudit:
    """Audit a reward from its raw scores and weights.

    Args:
        table: Raw scores, finite where a term applies; at least one prompt.
        mode: How terms are combined; only shares and the headroom of the total depend on it.

    Raises:
        ValueError: See `reweigh.contributions`.
    """
    shares = advantage_shares(table, mode=mode).tolist()
    terms = [
        _audit_term(name, table.raw[table.is_applicable[:, column], :, column], share)
        for column, (name, share) in enumerate(zip(table.names, shares, strict=True))
    ]
    return RewardAudit(
        terms=tuple(terms),
        correlations=correlations(table),
        headroom=headroom(combine(table, mode=mode)),
    )


def describe_rare_terms(
    weights: Mapping[str, float],
    counts: Mapping[str, int],
    total: int,
    *,
    of: str,
    others: Mapping[str, str] | None = None,
) -> list[str]:
    """Name the terms with a weight that apply to none or to fewer than half of the prompts.

    Where a term does not apply, its weight goes to the others: such a reward is another one than
    its weights say.

    Args:
        weights: By term, not all of them 0.
        counts: Prompts to which each of these terms applies.
        total: Prompts in all.
        of: What they are, such as `training prompts`.
        others: For terms that apply to some prompts, a few of those to which they do not.

    Returns:
        A line for each number of prompts, such as `lpips and ssim, 0.60 of the weight, apply to
        none of the 12 training prompts`; the rarest terms first.
    """
    sizes = {name: abs(weight) for name, weight in weights.items() if weight != 0}
    lines = []
    for count in sorted({counts[name] for name in sizes if 2 * counts[name] < total}):
        names = [name for name in sizes if counts[name] == count]
        listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        share = sum(sizes[name] for name in names) / sum(sizes.values())
        verb = "apply" if len(names) > 1 else "applies"
        number = str(count) if count else "none"
        line = f"{listed}, {share:.2f} of the weight, {verb} to {number} of the {total} {of}"
        # Terms of one line may be missing for different prompts; none has all to be named.
        named = {others[name] for name in names} if others and count else set()
        lines.append(f"{line}; not to {named.pop()}" if len(named) == 1 else line)
    return lines


def correlations(table: RewardTable) -> Float64[Tensor, "R R"]:
    """Pearson correlation of each pair of terms inside groups.

    Scores are centred in their group and pooled over the groups to which both terms apply, so
    that a group counts by how much its scores vary. That some prompts score high by both terms
    and others low by both does not count: no advantage compares them.

    Args:
        table: Raw scores, finite where a term applies.

    Returns:
        Symmetric, -1..1; NaN where a term is flat in every group to which both apply.
    """
    centred = _centre_where_varied(table)
    covariance = torch.einsum("pgr,pgs->rs", centred, centred)
    # [r, s]: of term r, over the groups to which s applies as well.
    variance = centred.square().sum(dim=1).T @ table.is_applicable.double()
    # 0 / 0, where a term is flat, is the NaN that is promised.
    return (covariance / (variance * variance.T).sqrt()).clamp(-1.0, 1.0)


def headroom(scores: Float32[Tensor, "P G"]) -> float:
    """Mean over prompts of the best of G minus the mean: what picking the best image would gain.

    Where it is near 0 there is nothing to reinforce: the policy does not reach better images than
    those it draws on average.

    Args:
        scores: Of one term, or totals.

    Returns:
        In units of the score, >= 0; NaN without prompts.
    """
    exact = scores.double()
    return (exact.amax(dim=1) - exact.mean(dim=1)).mean().item()


def saturation(scores: Float32[Tensor, "P G"]) -> float:
    """Share of a group's other images that score as high as its best one, averaged over groups.

    0 where one image is the best of every group, 1 where all groups are flat. It grows where a
    term has reached its ceiling, without knowing where that is: the best possible score is 1 for
    some terms and unknown or infinite for others. A term stuck at its floor is tied in the same
    way; its mean tells the two apart.

    Args:
        scores: Of one term; equal to within `reweigh.FLAT_TOLERANCE` counts as equal.

    Returns:
        0..1; NaN without prompts or with one image per prompt.
    """
    best = scores.amax(dim=1, keepdim=True)
    tolerance = FLAT_TOLERANCE * scores.abs().amax(dim=1, keepdim=True)
    tied = (scores >= best - tolerance).sum(dim=1) - 1
    # 0 / 0, where an image has no others, is the NaN that is promised.
    return (tied.double() / (scores.shape[1] - 1)).mean().item()


def decoder_fractions(
    decoded: Float32[Tensor, "P K R"], table: RewardTable
) -> Float64[Tensor, " R"]:
    """How large the decoder's own variance is beside that inside a group, per term.

        fraction = mean_P(var_K(decoded)) / mean_P(var_G(raw))

    with sample variances (divided by K - 1 and G - 1, unbiased whatever K and G are) and means
    over the prompts to which the term applies. It estimates a share but is one of two estimates
    divided, so that it can exceed 1; it is not clipped, because that would hide how noisy it is.
    With one initial noise per group the advantages do not hold this variance itself; a high
    fraction says that the term prefers one image to another by chance of that noise.

    Args:
        decoded: Raw scores of one and the same tokens per prompt, decoded under K seeds; finite
            where a term applies, K >= 2.
        table: Raw scores of the ordinary groups of the same prompts and terms, G >= 2.

    Returns:
        >= 0; NaN where a term applies to no prompt or is flat in every group.

    Raises:
        ValueError: Fewer than two seeds or images, or other prompts or terms than in the table.
    """
    prompts, seeds, terms = decoded.shape
    group_size = table.raw.shape[1]
    if (prompts, terms) != table.is_applicable.shape:
        raise ValueError(
            f"decoded scores of {prompts} prompts by {terms} terms beside a table of "
            f"{table.is_applicable.shape[0]} by {table.is_applicable.shape[1]}: both must be of "
            "the same prompts and terms; score both with one scorer"
        )
    if seeds < 2 or group_size < 2:
        raise ValueError(
            f"{seeds} seeds and {group_size} images per prompt: a variance needs two or more of "
            "each; decode the tokens under at least 2 seeds and sample at least 2 images"
        )
    of_groups = _sum_of_variances(table.raw, table)
    # Not infinite: without any variance there is nothing to take a share of.
    return _sum_of_variances(decoded, table) / of_groups.masked_fill(of_groups == 0, math.nan)


def find_conflicts(
    audit: RewardAudit,
    weights: Float32[Tensor, " R"],
    *,
    threshold: float = CONFLICT_THRESHOLD,
) -> tuple[Conflict, ...]:
    """Pairs of weighted terms that pull against each other inside groups, the worst first.

    What pulls is a score times its weight: where one of the two weights is negative, it is terms
    that rise together that are in conflict. A term of weight 0 pulls at nothing.

    Args:
        audit: Of a reward; an undefined correlation is no conflict.
        threshold: Correlation of the weighted scores, -1..0.
    """
    names = [term.name for term in audit.terms]
    signs = weights.sign().double()
    pulls = audit.correlations * torch.outer(signs, signs)
    # NaN compares as False.
    is_conflict = (pulls < threshold).triu(diagonal=1)
    conflicts = [
        Conflict(names[first], names[second], pulls[first, second].item())
        for first, second in is_conflict.nonzero().tolist()
    ]
    return tuple(sorted(conflicts, key=lambda conflict: conflict.correlation))


def _audit_term(name: str, scores: Float32[Tensor, "P G"], share: float) -> TermAudit:
    exact = scores.double()
    mean = exact.mean()
    within = exact - exact.mean(dim=1, keepdim=True)
    return TermAudit(
        name=name,
        mean=mean.item(),
        std=(exact - mean).square().mean().sqrt().item(),
        std_within=within.square().mean(dim=1).mean().sqrt().item(),
        flat_fraction=is_flat(scores).double().mean().item(),
        advantage_share=share,
        headroom=headroom(scores),
        saturation=saturation(scores),
    )


def _centre_where_varied(table: RewardTable) -> Float64[Tensor, "P G R"]:
    """Scores less their group's mean; exactly 0 in flat groups, whose roundings mean nothing."""
    exact = table.raw.double()
    is_left_out = is_flat(table.raw) | ~table.is_applicable
    return (exact - exact.mean(dim=1, keepdim=True)).masked_fill(is_left_out[:, None, :], 0.0)


def _sum_of_variances(
    scores: Float32[Tensor, "P N R"], table: RewardTable
) -> Float64[Tensor, " R"]:
    variance = scores.double().var(dim=1)
    return variance.masked_fill(is_flat(scores) | ~table.is_applicable, 0.0).sum(dim=0)
