"""Draw prompts by the spread of rewards that their groups showed at earlier visits.

A group whose rewards are all equal teaches nothing. Of a reward that is 0 or 1, prompts with a hit
rate near one half have the largest spread.
Source: learnability as the variance of success, Foster et al. 2025 (arXiv 2502.12272). Unlike
there, the spread is a standard deviation, and remembered from earlier steps, so it costs no images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence

import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from glm_grpo.grpo.advantages import centred_rewards
from glm_grpo.seeds import derive_seed

_KEPT = 0.5
"""Weight of earlier visits in the spread after another one."""
_FLOOR = 0.25
"""Fraction of the draws in which all prompts that were seen are equally probable."""


def group_spreads(ids: Sequence[str], rewards: Float32[Tensor, "P G"]) -> dict[str, float]:
    """Standard deviation of the rewards in each group, by prompt id, in reward units.

    That of the population of images that are not left out; exactly 0 in zero-std groups.

    Args:
        ids: Ids of the P prompts.
        rewards: Totals minus penalties; NaN for images that are left out of their group.
    """
    spreads = centred_rewards(rewards).square().nanmean(dim=1).sqrt()
    return dict(zip(ids, spreads.nan_to_num(0.0).tolist(), strict=True))


def note_spreads(spreads: MutableMapping[str, float], visit: Mapping[str, float]) -> None:
    """Note the groups of a step: the first visit of a prompt as it is, later ones averaged.

    Args:
        spreads: Moving average of the spread by prompt id, of the prompts that were seen.
        visit: Spread of each group of the step.
    """
    for prompt_id, spread in visit.items():
        before = spreads.get(prompt_id, spread)
        spreads[prompt_id] = _KEPT * before + (1 - _KEPT) * spread


def draw_order(
    ids: Sequence[str],
    spreads: Mapping[str, float],
    unseen_order: Sequence[int],
    *,
    step: int,
    seed: int,
) -> list[int]:
    """Order all prompts: unseen ones first, then a weighted draw of the others.

    The draw is without replacement, and determined by (seed, step, spreads).
    Source: Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir".

    Args:
        ids: Ids of all prompts.
        spreads: Moving average of the spread by prompt id, of the prompts that were seen.
        unseen_order: Rows of all prompts in the order in which they are seen for the first time.
        step: Training step, from 1.

    Returns:
        Rows of all prompts; the first ones are the batch.
    """
    unseen = [row for row in unseen_order if ids[row] not in spreads]
    seen = [row for row, prompt_id in enumerate(ids) if prompt_id in spreads]
    generator = torch.Generator().manual_seed(derive_seed(seed, "spread draw", step - 1))
    # One number for every prompt, so that it does not depend on which others were seen.
    waits = torch.empty(len(ids), dtype=torch.float64).exponential_(generator=generator)
    drawn = (waits[seen] / _probabilities(ids, spreads)).argsort(stable=True)
    return unseen + [seen[place] for place in drawn.tolist()]


def sampling_metrics(ids: Sequence[str], spreads: Mapping[str, float]) -> dict[str, float]:
    """What a draw with these spreads chooses from; arguments as in `draw_order`.

    The effective number of prompts is 1 / sum(p^2) over the probabilities p of the first draw among
    the prompts that were seen; NaN before any was.
    """
    probabilities = _probabilities(ids, spreads)
    effective = 1 / probabilities.square().sum().item() if len(probabilities) else math.nan
    return {
        "prompts/seen_fraction": len(probabilities) / len(ids),
        "prompts/effective_number": effective,
    }


def _probabilities(ids: Sequence[str], spreads: Mapping[str, float]) -> Float64[Tensor, " seen"]:
    """Probability of each prompt that was seen, in the order of `ids`."""
    seen = [spreads[prompt_id] for prompt_id in ids if prompt_id in spreads]
    weights = torch.tensor(seen, dtype=torch.float64)
    total = weights.sum()
    if total == 0:
        return torch.full_like(weights, 1 / max(len(seen), 1))
    return (1 - _FLOOR) * weights / total + _FLOOR / len(seen)
