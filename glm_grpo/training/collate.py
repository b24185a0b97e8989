"""Join parts of a batch, such as those of several processes, in prompt order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from glm_grpo.types import Experience, ImageBatch, Rollout
from rewards.types import RewardTable


def join_experiences(parts: Sequence[Experience]) -> Experience:
    """Join parts of one batch in prompt order."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return replace(
        first,
        prompts=replace(
            first.prompts,
            prompts=tuple(prompt for part in parts for prompt in part.prompts.prompts),
            decode_seeds=tuple(seed for part in parts for seed in part.prompts.decode_seeds),
            source_token_ids=_cat_if_any([part.prompts.source_token_ids for part in parts]),
        ),
        rollout=join_rollouts([part.rollout for part in parts]),
        images=join_images([part.images for part in parts]),
        scores=join_tables([part.scores for part in parts]),
        totals=torch.cat([part.totals for part in parts]),
        penalties=torch.cat([part.penalties for part in parts]),
        advantages=torch.cat([part.advantages for part in parts]),
        reference_log_probs=_cat_if_any([part.reference_log_probs for part in parts]),
        trained=None if first.trained is None else _join_trained(parts),
        place_credit=_cat_if_any([part.place_credit for part in parts]),
    )


def join_rollouts(parts: Sequence[Rollout]) -> Rollout:
    """Join token grids in prompt order."""
    if len(parts) == 1:
        return parts[0]
    return Rollout(
        token_ids=torch.cat([part.token_ids for part in parts]),
        log_probs=torch.cat([part.log_probs for part in parts]),
        sampling_mask=_cat_if_any([part.sampling_mask for part in parts]),
    )


def _join_trained(parts: Sequence[Experience]) -> Int64[Tensor, " K"]:
    starts = accumulate((len(part.totals) for part in parts), initial=0)
    return torch.cat(
        [part.trained_groups() + start for part, start in zip(parts, starts, strict=False)]
    )


def join_images(parts: Sequence[ImageBatch]) -> ImageBatch:
    """Join images in prompt order."""
    return ImageBatch(
        pixels=torch.cat([part.pixels for part in parts]),
        decode_seeds=tuple(seed for part in parts for seed in part.decode_seeds),
    )


def join_tables(tables: Sequence[RewardTable]) -> RewardTable:
    """Join tables of the same terms and weights in prompt order."""
    return replace(
        tables[0],
        raw=torch.cat([table.raw for table in tables]),
        is_applicable=torch.cat([table.is_applicable for table in tables]),
        notes=_join_groups([(table.notes, len(table.raw)) for table in tables]),
        score_map=_join_maps([(table.score_map, table) for table in tables]),
        kind_map=_join_maps([(table.kind_map, table) for table in tables]),
        score_boxes=_join_groups([(table.score_boxes, len(table.raw)) for table in tables]),
        objects=_join_groups([(table.objects, len(table.raw)) for table in tables]),
    )


def _join_groups(
    found: Sequence[tuple[Mapping[str, tuple[Any, ...]], int]],
) -> dict[str, tuple[Any, ...]]:
    """Join what terms found in each group; empty for the groups of a table without the term.

    Args:
        found: What each table has by term name, and its number of groups.
    """
    names = dict.fromkeys(name for groups, _ in found for name in groups)
    return {
        name: tuple(group for groups, count in found for group in groups.get(name, ((),) * count))
        for name in names
    }


def _join_maps(
    found: Sequence[tuple[Mapping[str, Tensor], RewardTable]],
) -> dict[str, Float32[Tensor, "P G h w"]]:
    names = dict.fromkeys(name for maps, _ in found for name in maps)
    # Of a term that applies to no prompt of a part, that part has none.
    shape = next((each.shape[2:] for maps, _ in found for each in maps.values()), ())
    return {
        name: torch.cat(
            [
                maps.get(name, table.raw.new_zeros(*table.raw.shape[:2], *shape))
                for maps, table in found
            ]
        )
        for name in names
    }


def _cat_if_any(tensors: Sequence[Tensor | None]) -> Tensor | None:
    found = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(found) if found else None
