"""Other weights on what a run sampled and scored: no model, no picture."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from jaxtyping import Bool, Float32, Int8
from torch import Tensor

from glm_grpo.analysis.stored import StoredGroups, StoredRollouts, read_rollouts
from glm_grpo.config import Config, override_error, validate_config
from glm_grpo.config.problems import Problem, describe_problems
from glm_grpo.errors import ConfigError, StorageError
from glm_grpo.grpo.advantages import group_advantages
from glm_grpo.report.rescore_page import MovedImage, Rescoring, SettingChange, TermChange
from glm_grpo.storage import RunFolder
from glm_grpo.training.resume import read_config
from rewards.reweigh import FLAT_TOLERANCE, advantage_shares, combine, is_flat
from rewards.types import RewardTable

_MOVED_IMAGES = 8
"""Images shown of those that gain most, and of those that lose most."""
_CHANGEABLE = re.compile(
    r"reward\.combine|reward\.terms\.(?P<term>\w+)\.(weight|std_floor)|advantage\.\w+"
)


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
    before = _score(stored, config)
    _check_as_stored(folder, stored, before)
    _check_every_prompt_has_a_total(stored.groups, other)
    after = _score(stored, other)
    ranks = rank_correlations(before.totals, after.totals)
    ranked = ranks[~ranks.isnan()]
    gaining, losing = _find_moved(stored.groups, before.advantages, after.advantages)
    return Rescoring(
        changes=_list_changes(config, other, overrides),
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
    )


def override_weighing(config: Config, overrides: Sequence[str]) -> Config:
    """The config of a run with other weights, another combination or other advantages.

    Args:
        config: Of the run.
        overrides: `key=value` with the keys `reward.terms.<name>.weight`,
            `reward.terms.<name>.std_floor`, `reward.combine` and `advantage.*`, written as for
            train.py.

    Raises:
        ConfigError: A key is another one, names a term the run did not score, or a value is
            refused.
    """
    values: dict[str, Any] = config.model_dump(mode="json")
    # What is only tried out harms no policy: a watched term may be weighed, and one that looks at
    # the picture alone may stand by itself.
    values["reward"] |= {"watch": [], "allow_untied": True}
    problems = []
    for override in overrides:
        key, value = _parse_override(override)
        problem = _find_problem(key, value, config)
        if problem is not None:
            problems.append(problem)
            continue
        *sections, name = key.split(".")
        section = values
        for part in sections:
            section = section[part]
        section[name] = value
    if problems:
        raise ConfigError(describe_problems(problems))
    return validate_config(values)


def winner_changes(
    before: Float32[Tensor, "P G"], after: Float32[Tensor, "P G"]
) -> Bool[Tensor, " P"]:
    """Whether none of a group's best images is among its best any more.

    Totals within `FLAT_TOLERANCE` of the highest count as best: a flat group has no winner to lose.
    """
    return ~(_is_best(before) & _is_best(after)).any(dim=1)


def rank_correlations(
    before: Float32[Tensor, "P G"], after: Float32[Tensor, "P G"]
) -> Float32[Tensor, " P"]:
    """Kendall's tau-b of each group; NaN where a group is flat before or after.

    With C pairs in the same order, D in the opposite one, N all pairs and T those tied:

        tau_b = (C - D) / sqrt((N - T_before) (N - T_after))

    Source: Kendall, The treatment of ties in ranking problems, Biometrika 33 (1945). Totals that
    differ by no more than `FLAT_TOLERANCE` of the group's largest are tied.
    """
    order_before, order_after = _pair_orders(before), _pair_orders(after)
    agreement = (order_before * order_after).sum(dim=1, dtype=torch.float64)
    untied = order_before.abs().sum(dim=1, dtype=torch.float64)
    untied *= order_after.abs().sum(dim=1, dtype=torch.float64)
    return (agreement / untied.sqrt()).float()


def _parse_override(override: str) -> tuple[str, object]:
    """Key and value, read as train.py reads them."""
    try:
        (parsed,) = OverridesParser.create().parse_overrides([override])
    except HydraException as error:
        raise override_error(error) from error
    if parsed.is_delete() or parsed.is_sweep_override():
        raise ConfigError(
            f"{override!r} gives no value; rescore tries one value a key: write "
            "reward.terms.ocr.weight=0.5, say"
        )
    return parsed.key_or_group, parsed.value()


def _find_problem(key: str, value: object, config: Config) -> Problem | None:
    match = _CHANGEABLE.fullmatch(key)
    if match is None:
        rule = (
            "is not a key that rescore can change: images and raw scores are what the run stored. "
            "It can change reward.terms.<name>.weight and .std_floor, reward.combine, advantage.*"
        )
        return Problem(key, value, rule, f"train a run with it: python train.py {key}={value}")
    name = match["term"]
    if name is None or name in config.reward.terms:
        return None
    rule = (
        f"the run did not score {name!r}, so no table holds its scores; it scored "
        f"{', '.join(config.reward.terms)}"
    )
    remedy = (
        f"use one of those, or train a run that scores {name} too, with weight 0 if it is only to "
        f"be watched: python train.py +reward.terms.{name}.weight=0"
    )
    return Problem(key, value, rule, remedy)


def _score(stored: StoredRollouts, config: Config) -> _Scored:
    """As training did: the terms of all groups at once, advantages step by step."""
    reward, advantage = config.reward, config.advantage
    floors = {name: term.std_floor for name, term in reward.terms.items()}
    table = stored.groups.weigh(reward.weights(), floors)
    totals = combine(table, mode=reward.combine)
    if not totals.isfinite().all():
        raise ConfigError(
            f"reward.terms have weights {reward.weights()}: with them a total is not a finite "
            "float32 number; use smaller ones"
        )
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


def _check_every_prompt_has_a_total(groups: StoredGroups, config: Config) -> None:
    weights = torch.tensor(list(config.reward.weights().values()))
    has_total = (groups.is_applicable & (weights != 0)).any(dim=1)
    for row in (~has_total).nonzero().flatten()[:1].tolist():
        applicable = zip(groups.names, groups.is_applicable[row].tolist(), strict=True)
        names = [name for name, is_applicable in applicable if is_applicable]
        raise ConfigError(
            f"prompt {groups.prompt_ids[row]} has no total: of the terms that apply to it "
            f"({', '.join(names)}) none has a weight other than 0; set one, such as "
            f"reward.terms.{names[0]}.weight=0.1"
        )


def _list_changes(
    config: Config, other: Config, overrides: Sequence[str]
) -> tuple[SettingChange, ...]:
    before, after = config.model_dump(mode="json"), other.model_dump(mode="json")
    keys = dict.fromkeys(_parse_override(override)[0] for override in overrides)
    changes = (SettingChange(key, _look_up(before, key), _look_up(after, key)) for key in keys)
    return tuple(change for change in changes if change.before != change.after)


def _look_up(values: Mapping[str, Any], key: str) -> object:
    found: Any = values
    for part in key.split("."):
        found = found[part]
    return found


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


def _is_best(totals: Float32[Tensor, "P G"]) -> Bool[Tensor, "P G"]:
    return totals >= totals.amax(dim=1, keepdim=True) - _tolerance(totals)


def _pair_orders(totals: Float32[Tensor, "P G"]) -> Int8[Tensor, "P pairs"]:
    """1, -1 or 0 for every pair of a group: which of the two is higher, or neither."""
    first, second = torch.triu_indices(totals.shape[1], totals.shape[1], offset=1)
    differences = totals[:, first] - totals[:, second]
    is_tied = differences.abs() <= _tolerance(totals)
    return differences.sign().to(torch.int8).masked_fill(is_tied, 0)


def _tolerance(totals: Float32[Tensor, "P G"]) -> Float32[Tensor, "P 1"]:
    return FLAT_TOLERANCE * totals.abs().amax(dim=1, keepdim=True)
