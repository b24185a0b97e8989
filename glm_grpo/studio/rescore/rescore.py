"""Compute what other weights would have made of a run's stored scores."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float32, Int8
from torch import Tensor

from glm_grpo.config import (
    Config,
    flatten,
    parse_override,
    set_key,
    validate_config,
    write_out_weights,
)
from glm_grpo.errors import ConfigError, StorageError
from glm_grpo.grpo.advantages import group_advantages
from glm_grpo.output import counted
from glm_grpo.run.config import read_config
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.stored import StoredGroups, StoredRollouts, read_rollouts
from rewards.coverage import describe_rare_terms
from rewards.problems import Problem, describe_problems, known_keys, nearest_keys
from rewards.terms import KINDS
from rewards.types import RewardError, RewardTable
from rewards.weighting import ZERO_STD_TOLERANCE, advantage_shares, combine, is_zero_std

_TERM_OPTIONS = ("weight", "std_floor")
_OF_IMAGES = ("normalization", "std_floor", "clip")
"""Options of the advantages of images; those of credit by place need more than scores."""
_CHANGEABLE = re.compile(
    rf"reward\.combine|advantage\.({'|'.join(_OF_IMAGES)})"
    rf"|reward\.terms\.(?P<term>\w+)\.({'|'.join(_TERM_OPTIONS)})"
)
_CHANGEABLE_IN_WORDS = (
    "<name>=WEIGHT, reward.terms.<name>.std_floor, reward.combine and, of the images' advantages, "
    "advantage.normalization, .std_floor and .clip"
)

SHOWN_DECIMALS = 2
"""Decimals of an advantage in a table."""
_MOVED_IMAGES = 8
"""Images shown of those that gain most, and of those that lose most."""


def winner_changes(
    before: Float32[Tensor, "P G"], after: Float32[Tensor, "P G"]
) -> Bool[Tensor, " P"]:
    """Whether none of a group's best images is still among its best.

    Totals within `ZERO_STD_TOLERANCE` of the highest count as best, so a zero-std group has no
    single winner; nor has one of which no image has a total.
    """
    return ~(_is_best(before) & _is_best(after)).any(dim=1)


def kendall_taus(
    before: Float32[Tensor, "P G"], after: Float32[Tensor, "P G"]
) -> Float32[Tensor, " P"]:
    """Kendall's tau-b of each group; NaN if all its totals are equal before or after.

    With C pairs in the same order, D in the opposite one, N all pairs and T those tied:

        tau_b = (C - D) / sqrt((N - T_before) (N - T_after))

    Source: Kendall, The treatment of ties in ranking problems, Biometrika 33 (1945). Totals that
    differ by at most `ZERO_STD_TOLERANCE` times the group's largest are tied; scipy's
    `kendalltau` ties only equal ones.
    """
    order_before, order_after = _pair_orders(before), _pair_orders(after)
    agreement = (order_before * order_after).sum(dim=1, dtype=torch.float64)
    untied = order_before.abs().sum(dim=1, dtype=torch.float64)
    untied *= order_after.abs().sum(dim=1, dtype=torch.float64)
    return (agreement / untied.sqrt()).float()


def _is_best(totals: Float32[Tensor, "P G"]) -> Bool[Tensor, "P G"]:
    is_missing = totals.isnan()
    best = totals.masked_fill(is_missing, -torch.inf).amax(dim=1, keepdim=True)
    return (totals >= best - _tolerance(totals)) | is_missing.all(dim=1, keepdim=True)


def _pair_orders(totals: Float32[Tensor, "P G"]) -> Int8[Tensor, "P pairs"]:
    """1 or -1 for every pair of a group, by which of the two is higher; 0 for a tie."""
    first, second = torch.triu_indices(totals.shape[1], totals.shape[1], offset=1)
    differences = totals[:, first] - totals[:, second]
    # A pair has no order if one of the two is left out of its group.
    is_tied = differences.isnan() | (differences.abs() <= _tolerance(totals))
    return differences.masked_fill(is_tied, 0.0).sign().to(torch.int8)


def _tolerance(totals: Float32[Tensor, "P G"]) -> Float32[Tensor, "P 1"]:
    return ZERO_STD_TOLERANCE * totals.nan_to_num().abs().amax(dim=1, keepdim=True)


@dataclass(frozen=True)
class SettingChange:
    """A config key with a new value."""

    key: str
    before: object
    after: object


@dataclass(frozen=True)
class TermChange:
    """A term under the run's weights and under the new ones.

    Attributes:
        share_before: Share of the variance within groups, see `rewards.weighting.advantage_shares`.
    """

    name: str
    weight_before: float
    weight_after: float
    share_before: float
    share_after: float


@dataclass(frozen=True)
class MovedImage:
    """An image with its advantage under both sets of weights.

    Attributes:
        step: Step in which it was sampled.
        sample: Its number in the group.
        image: Path relative to the run folder.
    """

    step: int
    prompt_id: str
    prompt: str
    sample: int
    image: str
    advantage_before: float
    advantage_after: float


@dataclass(frozen=True)
class Rescoring:
    """A run's rollouts under other weights, compared with its own.

    Attributes:
        changes: Changed keys; empty for the run's own weights.
        steps: Number of steps with a rollout.
        groups: Number of groups, one per step and prompt.
        images: Number of images.
        changed_winners: Number of groups in which no best image is still among the best.
        rank_correlation: Kendall's tau-b of the totals, averaged over the groups with a std
            before and after; None if there is no such group.
        ranked_groups: Number of those groups.
        zero_std_before: Number of groups whose images had equal totals.
        terms: Terms in the order of the R axis, except those that apply to no sampled prompt.
        gaining: Images that gain the most advantage, in descending order; those whose advantage
            stays the same to two decimals are left out.
        losing: Images that lose the most advantage, likewise.
        rare_terms: Lines on terms that apply to few of the prompts.
    """

    changes: tuple[SettingChange, ...]
    steps: int
    groups: int
    images: int
    changed_winners: int
    rank_correlation: float | None
    ranked_groups: int
    zero_std_before: int
    zero_std_after: int
    terms: tuple[TermChange, ...]
    gaining: tuple[MovedImage, ...]
    losing: tuple[MovedImage, ...]
    rare_terms: tuple[str, ...] = ()

    def __repr__(self) -> str:
        groups = counted(self.groups, "group")
        moved = f"{self.changed_winners} of {groups} change their winner"
        return f"Rescoring({counted(self.images, 'image')}, {moved})"

    def _repr_html_(self) -> str:
        import pandas  # noqa: PLC0415 (the command does without it)

        table = pandas.DataFrame([asdict(term) for term in self.terms]).set_index("name")
        return f"<p>{self!r}</p>{table.to_html(float_format='{:z.3f}'.format)}"


def override_weighing(config: Config, overrides: Sequence[str]) -> Config:
    """The config of a run with other weights, another combination or other advantages.

    Args:
        overrides: `key=value` as for train.py, with the keys `reward.terms.<name>.weight` and
            `.std_floor`, `reward.combine`, `advantage.normalization`, `.std_floor` and `.clip`;
            `<name>=0.5` means `reward.terms.<name>.weight=0.5`.
    """
    values: dict[str, Any] = config.model_dump(mode="json")
    # No policy is trained here: a watched term may have a weight, and a term that uses only the
    # image may be the only one.
    values["reward"] |= {"watch": [], "allow_image_only": True}
    problems = []
    for override in _with_whole_weights(overrides, config):
        key, value = parse_override(override)
        problem = _find_problem(key, value, config)
        if problem is not None:
            problems.append(problem)
            continue
        set_key(values, key, value)
    if problems:
        raise ConfigError(describe_problems(problems))
    return validate_config(values, is_stored=True)


def list_changes(
    config: Config, other: Config, overrides: Sequence[str]
) -> tuple[SettingChange, ...]:
    """Keys whose value the overrides change.

    Args:
        other: Result of `override_weighing`.
    """
    before, after = config.model_dump(mode="json"), other.model_dump(mode="json")
    whole = _with_whole_weights(overrides, config)
    keys = dict.fromkeys(parse_override(override)[0] for override in whole)
    changes = (SettingChange(key, _look_up(before, key), _look_up(after, key)) for key in keys)
    return tuple(change for change in changes if change.before != change.after)


def _with_whole_weights(overrides: Sequence[str], config: Config) -> list[str]:
    whole = write_out_weights(overrides)
    # A term without weight counts as little as an absent one.
    nulls = {f"reward.terms.{name}=null": name for name in config.reward.terms}
    plain = [word.removeprefix("++") for word in whole]
    return [f"reward.terms.{nulls[word]}.weight=0" if word in nulls else word for word in plain]


def _find_problem(key: str, value: object, config: Config) -> Problem | None:
    match = _CHANGEABLE.fullmatch(key)
    if match is None:
        rule = (
            "is not a key that rescore can change: images and raw scores are fixed. "
            f"It can change {_CHANGEABLE_IN_WORDS}"
        )
        return Problem(key, value, rule, _remedy_for_other_key(key, value, config))
    name = match["term"]
    if name is None or name in config.reward.terms:
        return None
    rule = (
        f"the run did not score {name!r}, so no table has its scores; it scored "
        f"{', '.join(config.reward.terms)}"
    )
    return Problem(key, value, rule, _remedy_for_other_term(name, config))


def _remedy_for_other_key(key: str, value: object, config: Config) -> str:
    if key in known_keys(Config) or key in flatten(config.model_dump(mode="json")):
        return f"train a run with it: glm-grpo train {key}={value}"
    terms = itertools.product(config.reward.terms, _TERM_OPTIONS)
    keys = [
        *config.reward.terms,
        "reward.combine",
        *(f"reward.terms.{name}.{option}" for name, option in terms),
        *(f"advantage.{option}" for option in _OF_IMAGES),
    ]
    nearest = nearest_keys(key, keys)
    return f"did you mean {nearest[0]}?" if nearest else f"use one of {_CHANGEABLE_IN_WORDS}"


def _remedy_for_other_term(name: str, config: Config) -> str:
    if name in KINDS:
        return (
            "use one of those, or add the term to a new run, with weight 0 if it should not be "
            f"trained on: glm-grpo train +reward.terms.{name}.weight=0"
        )
    nearest = difflib.get_close_matches(name, config.reward.terms, n=1)
    return f"did you mean reward.terms.{nearest[0]}?" if nearest else "use one of those"


def _look_up(values: Mapping[str, Any], key: str) -> object:
    found: Any = values
    for part in key.split("."):
        found = found[part]
    return found


@dataclass(frozen=True)
class _Scored:
    """Rollouts scored under one config."""

    table: RewardTable
    totals: Float32[Tensor, "P G"]
    advantages: Float32[Tensor, "P G"]
    shares: Float32[Tensor, " R"]


def rescore(folder: RunFolder, overrides: Sequence[str]) -> Rescoring:
    """Compute totals, advantages and shares of a run's rollouts under other weights.

    First computes everything with the run's own config, and checks that it equals the stored values
    to the bit.

    Args:
        overrides: `key=value`, see `override_weighing`; none: the run's own weights.
    """
    config = read_config(folder)
    other = override_weighing(config, overrides)
    group_size = config.rollout.group_size
    stored = read_rollouts(folder, tuple(config.reward.terms), group_size=group_size)
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
        zero_std_before=int(is_zero_std(before.totals).sum()),
        zero_std_after=int(is_zero_std(after.totals).sum()),
        terms=_term_changes(config, other, before, after),
        gaining=gaining,
        losing=losing,
        rare_terms=tuple(_describe_rare_terms(stored.groups, other)),
    )


def _describe_rare_terms(groups: StoredGroups, config: Config) -> list[str]:
    # A prompt counts once, although many steps sample it.
    rows = dict(zip(groups.prompt_ids, groups.is_applicable.tolist(), strict=True))
    counts = dict(zip(groups.names, map(sum, zip(*rows.values(), strict=True)), strict=True))
    weights = config.reward.weights()
    return describe_rare_terms(weights, counts, len(rows), set_name="prompts that the run sampled")


def _score(stored: StoredRollouts, config: Config) -> _Scored:
    reward, advantage = config.reward, config.advantage
    floors = {name: term.std_floor for name, term in reward.terms.items()}
    table = stored.groups.weigh(reward.weights(), floors)
    _, counts = stored.groups.steps.unique_consecutive(return_counts=True)
    try:
        totals = combine(table, mode=reward.combine)
    except RewardError as error:
        raise ConfigError(
            f"reward.terms have weights {reward.weights()}: with these a total is not a finite "
            "float32 number; use smaller ones"
        ) from error
    advantages = [
        group_advantages(
            rewards,
            normalization=advantage.normalization,
            std_floor=advantage.std_floor,
            clip=advantage.clip,
        )
        for rewards in (totals - stored.penalty).split(counts.tolist())
    ]
    shares = advantage_shares(table, mode=reward.combine)
    return _Scored(table, totals, torch.cat(advantages), shares)


def _check_as_stored(folder: RunFolder, stored: StoredRollouts, scored: _Scored) -> None:
    for name, found, expected in (
        ("total", stored.totals, scored.totals),
        ("advantage", stored.advantages, scored.advantages),
    ):
        # As bits, so that 0 differs from -0; an image that is left out has NaN in both.
        differs = found.view(torch.int32) != expected.view(torch.int32)
        differs &= ~(found.isnan() & expected.isnan())
        is_other = differs.any(dim=1)
        for row in is_other.nonzero().flatten()[:1].tolist():
            path = folder.rollout_path(int(stored.groups.steps[row]))
            raise StorageError(
                f"{path}: column {name} of prompt {stored.groups.prompt_ids[row]} is "
                f"{found[row].tolist()}, but its raw scores and the run's config.yaml give "
                f"{expected[row].tolist()}. In all {int(is_other.sum())} groups differ. The table "
                "or the config was changed, or written by another version; restore the originals."
            )


def _check_every_prompt_has_a_total(groups: StoredGroups, config: Config) -> None:
    weights = torch.tensor(list(config.reward.weights().values()), dtype=torch.float32)
    has_total = (groups.is_applicable & (weights != 0)).any(dim=1)
    for row in (~has_total).nonzero().flatten()[:1].tolist():
        applicable = zip(groups.names, groups.is_applicable[row].tolist(), strict=True)
        names = [name for name, is_applicable in applicable if is_applicable]
        raise ConfigError(
            f"prompt {groups.prompt_ids[row]} has no total: of the terms that apply to it "
            f"({', '.join(names)}) none has a weight other than 0; set one, such as "
            f"reward.terms.{names[0]}.weight=0.1"
        )


def _term_changes(
    config: Config, other: Config, before: _Scored, after: _Scored
) -> tuple[TermChange, ...]:
    # Weights of the config, because those of the table are rounded to float32.
    applies = before.table.is_applicable.any(dim=0).tolist()
    columns = zip(
        before.table.names,
        config.reward.weights().values(),
        other.reward.weights().values(),
        before.shares.tolist(),
        after.shares.tolist(),
        strict=True,
    )
    changes = (TermChange(*column) for column in columns)
    return tuple(change for change, is_used in zip(changes, applies, strict=True) if is_used)


def _find_moved(
    groups: StoredGroups, before: Float32[Tensor, "P G"], after: Float32[Tensor, "P G"]
) -> tuple[tuple[MovedImage, ...], tuple[MovedImage, ...]]:
    """Images that gain and that lose the most advantage, if the shown decimals change."""
    changes = (after.double() - before.double()).flatten()
    shown = 10**SHOWN_DECIMALS
    is_seen = ((before.double() * shown).round() != (after.double() * shown).round()).flatten()
    changes = changes.where(is_seen, 0.0)
    # Stable, so that of equal changes the first image comes first.
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
