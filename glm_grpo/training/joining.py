"""Join parts of a batch, such as those of several processes, in prompt order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from jaxtyping import Int64
from torch import Tensor

from glm_grpo.types import Advantages, Experience, ImageBatch
from rewards.types import RewardTable


def join_experiences(parts: Sequence[Experience]) -> Experience:
    """Join parts of one batch in prompt order; none may have a correction yet."""
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
        rollout=replace(
            first.rollout,
            token_ids=torch.cat([part.rollout.token_ids for part in parts]),
            log_probs=torch.cat([part.rollout.log_probs for part in parts]),
            sampling_mask=_cat_if_any([part.rollout.sampling_mask for part in parts]),
        ),
        images=join_images([part.images for part in parts]),
        rewards=join_tables([part.rewards for part in parts]),
        totals=torch.cat([part.totals for part in parts]),
        penalties=torch.cat([part.penalties for part in parts]),
        advantages=Advantages(
            torch.cat([part.advantages.values for part in parts]),
            torch.cat([part.advantages.is_flat for part in parts]),
        ),
        reference_log_probs=_cat_if_any([part.reference_log_probs for part in parts]),
        trained=None if first.trained is None else _join_trained(parts),
    )


def _join_trained(parts: Sequence[Experience]) -> Int64[Tensor, " K"]:
    starts = accumulate((len(part.totals) for part in parts), initial=0)
    return torch.cat(
        [part.trained_rows() + start for part, start in zip(parts, starts, strict=False)]
    )


def join_images(parts: Sequence[ImageBatch]) -> ImageBatch:
    """Join pictures in prompt order."""
    return ImageBatch(
        pixels=torch.cat([part.pixels for part in parts]),
        decode_seeds=tuple(seed for part in parts for seed in part.decode_seeds),
    )


def join_tables(tables: Sequence[RewardTable]) -> RewardTable:
    """Join tables of the same terms and weights in prompt order."""
    noting = dict.fromkeys(name for table in tables for name in table.notes)
    return replace(
        tables[0],
        raw=torch.cat([table.raw for table in tables]),
        is_applicable=torch.cat([table.is_applicable for table in tables]),
        notes={
            name: tuple(
                group
                for table in tables
                for group in table.notes.get(name, ((),) * len(table.is_applicable))
            )
            for name in noting
        },
    )


def _cat_if_any(tensors: Sequence[Tensor | None]) -> Tensor | None:
    found = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(found) if found else None
