"""Other weights on what a run sampled and scored: no model, no picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float32
from torch import Tensor

from glm_grpo.config import Config
from glm_grpo.errors import ConfigError, StorageError
from glm_grpo.grpo.advantages import group_advantages
from glm_grpo.rescore.group_order import kendall_taus, winner_changes
from glm_grpo.rescore.overrides import list_changes, override_weighing
from glm_grpo.rescore.rescoring import MovedImage, Rescoring, TermChange
from glm_grpo.run.config import read_config
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.stored import StoredGroups, StoredRollouts, read_rollouts
from rewards.audit.audit import describe_rare_terms
from rewards.reweigh import advantage_shares, combine, is_flat
from rewards.types import RewardError, RewardTable

_MOVED_IMAGES = 8
"""Images shown of those that gain most, and of those that lose most."""


@dataclass(frozen=True)
class _Scored:
    """Rollouts under one config."""

    table: RewardTable
    totals: Float32[Tensor, "P G"]
    advantages: Float32[Tensor, "P G"]
    shares: Float32[Tensor, " R"]


def rescore(folder: RunFolder, overrides: Sequence[str]) -> Rescoring:
    """Totals, advantages and shares of a run's rollouts had it been weighed in another way.

    First everything is computed with the run's own config and held against what it stored.

    Args:
        folder: The run.
        overrides: `key=value`, see `override_weighing`; none for the run's own weights.

    Raises:
        ConfigError: An override is refused, or leaves a prompt without a total.
        CheckpointError: The folder holds no run.
        StorageError: There is no rollout, a table is damaged, or what it stored does not follow
            from its raw scores and the run's config.
    """
    config = read_config(folder)
    other = override_weighing(config, overrides)
    group_size = config.rollout.group_size
    stored = read_rollouts(folder, tuple(config.reward.terms), group_size=group_size)
    _check_every_prompt_had_a_total(folder, stored.groups, config)
    before = _score(stored, config)
    _check_as_stored(folder, stored, before)
    _check_every_prompt_has_a_total(stored.groups, other)
    after = _score(stored, other)
    ranks = kendall_taus(before.totals, after.totals)
    ranked = ranks[~ranks.isnan()]
    gaining, losing = _find_moved(stored.groups, before.advantages, after.advantages)
    return Rescoring(
        changes=list_changes(config, other, overrides),
        steps=len(stored.groups.steps.unique()),
        groups=len(stored.groups.steps),
        images=len(stored.groups.images),
        changed_winners=int(winner_changes(before.totals, after.totals).sum()),
        rank_correlation=ranked.mean().item() if len(ranked) else None,
        ranked_groups=len(ranked),
        flat_before=int(is_flat(before.totals).sum()),
        flat_after=int(is_flat(after.totals).sum()),
        terms=_term_changes(before, after),
        gaining=gaining,
        losing=losing,
        rare_terms=tuple(_describe_rare_terms(stored.groups, other)),
    )


def _describe_rare_terms(groups: StoredGroups, config: Config) -> list[str]:
    # A prompt is sampled at many steps, and counts once.
    rows = dict(zip(groups.prompt_ids, groups.is_applicable.tolist(), strict=True))
    counts = dict(zip(groups.names, map(sum, zip(*rows.values(), strict=True)), strict=True))
    weights = config.reward.weights()
    return describe_rare_terms(weights, counts, len(rows), of="prompts that the run sampled")


def _score(stored: StoredRollouts, config: Config) -> _Scored:
    """As training did: the terms of all groups at once, advantages step by step."""
    reward, advantage = config.reward, config.advantage
    floors = {name: term.std_floor for name, term in reward.terms.items()}
    table = stored.groups.weigh(reward.weights(), floors)
    try:
        totals = combine(table, mode=reward.combine)
    except RewardError as error:
        raise ConfigError(
            f"reward.terms have weights {reward.weights()}: with them a total is not a finite "
            "float32 number; use smaller ones"
        ) from error
    _, counts = stored.groups.steps.unique_consecutive(return_counts=True)
    advantages = [
        group_advantages(
            returns,
            normalization=advantage.normalization,
            std_floor=advantage.std_floor,
            clip=advantage.clip,
        ).values
        for returns in (totals - stored.penalty).split(counts.tolist())
    ]
    shares = advantage_shares(table, mode=reward.combine)
    return _Scored(table, totals, torch.cat(advantages), shares)


def _check_as_stored(folder: RunFolder, stored: StoredRollouts, scored: _Scored) -> None:
    for name, found, expected in (
        ("total", stored.totals, scored.totals),
        ("advantage", stored.advantages, scored.advantages),
    ):
        # Bits, so that NaN equals itself and 0 is not -0.
        is_other = (found.view(torch.int32) != expected.view(torch.int32)).any(dim=1)
        for row in is_other.nonzero().flatten()[:1].tolist():
            path = folder.rollout_path(int(stored.groups.steps[row]))
            raise StorageError(
                f"{path}: column {name} of prompt {stored.groups.prompt_ids[row]} holds "
                f"{found[row].tolist()}; its raw scores and the run's config.yaml give "
                f"{expected[row].tolist()}. In all {int(is_other.sum())} groups differ. Table or "
                "config were changed, or written by another version: restore what the run wrote."
            )


def _first_without_total(groups: StoredGroups, config: Config) -> list[int]:
    """The first group of whose terms none has a weight; empty where there is none."""
    weights = torch.tensor(list(config.reward.weights().values()))
    has_total = (groups.is_applicable & (weights != 0)).any(dim=1)
    rows: list[int] = (~has_total).nonzero().flatten()[:1].tolist()
    return rows


def _check_every_prompt_had_a_total(
    folder: RunFolder, groups: StoredGroups, config: Config
) -> None:
    for row in _first_without_total(groups, config):
        path = folder.rollout_path(int(groups.steps[row]))
        raise StorageError(
            f"{path}: prompt {groups.prompt_ids[row]} has scores of no term that has a weight in "
            "the run's config.yaml. Table or config were changed: restore what the run wrote"
        )


def _check_every_prompt_has_a_total(groups: StoredGroups, config: Config) -> None:
    for row in _first_without_total(groups, config):
        applicable = zip(groups.names, groups.is_applicable[row].tolist(), strict=True)
        names = [name for name, is_applicable in applicable if is_applicable]
        raise ConfigError(
            f"prompt {groups.prompt_ids[row]} has no total: of the terms that apply to it "
            f"({', '.join(names)}) none has a weight other than 0; set one, such as "
            f"reward.terms.{names[0]}.weight=0.1"
        )


def _term_changes(before: _Scored, after: _Scored) -> tuple[TermChange, ...]:
    columns = zip(
        before.table.names,
        before.table.weights.tolist(),
        after.table.weights.tolist(),
        before.shares.tolist(),
        after.shares.tolist(),
        strict=True,
    )
    return tuple(TermChange(*column) for column in columns)


def _find_moved(
    groups: StoredGroups, before: Float32[Tensor, "P G"], after: Float32[Tensor, "P G"]
) -> tuple[tuple[MovedImage, ...], tuple[MovedImage, ...]]:
    """Images that gain most advantage, and those that lose most."""
    changes = (after.double() - before.double()).flatten()
    # Stable: of equal changes, the first image is named first.
    upwards, downwards = changes.argsort(stable=True), (-changes).argsort(stable=True)
    gaining = [row for row in downwards[:_MOVED_IMAGES].tolist() if changes[row] > 0]
    losing = [row for row in upwards[:_MOVED_IMAGES].tolist() if changes[row] < 0]
    return (
        tuple(_describe_image(groups, row, before, after) for row in gaining),
        tuple(_describe_image(groups, row, before, after) for row in losing),
    )


def _describe_image(
    groups: StoredGroups, row: int, before: Float32[Tensor, "P G"], after: Float32[Tensor, "P G"]
) -> MovedImage:
    group, sample = divmod(row, before.shape[1])
    return MovedImage(
        step=int(groups.steps[group]),
        prompt_id=groups.prompt_ids[group],
        prompt=groups.prompts[group],
        sample=sample,
        image=groups.images[row],
        advantage_before=before[group, sample].item(),
        advantage_after=after[group, sample].item(),
    )
