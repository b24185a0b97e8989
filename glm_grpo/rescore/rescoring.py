"""What other weights would have done to a run's rollouts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SettingChange:
    """One key that was set to something else.

    Attributes:
        key: Dotted, as in the config.
        before: As the run was trained.
        after: As it was rescored.
    """

    key: str
    before: object
    after: object


@dataclass(frozen=True)
class TermChange:
    """One term under the run's weights and under the others.

    Attributes:
        name: Of the term.
        weight_before: In the run.
        weight_after: In the rescoring.
        share_before: Of the variance inside groups, see `rewards.reweigh.advantage_shares`.
        share_after: The same in the rescoring.
    """

    name: str
    weight_before: float
    weight_after: float
    share_before: float
    share_after: float


@dataclass(frozen=True)
class MovedImage:
    """One image and what the other weights would have made of it.

    Attributes:
        step: In which it was sampled.
        prompt_id: Of its prompt.
        prompt: The caption.
        sample: Its number in the group.
        image: Path relative to the run folder.
        advantage_before: As stored.
        advantage_after: As rescored.
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
    """A run's rollouts under other weights, beside what they were.

    Attributes:
        changes: What was set to something else; empty for the run's own weights.
        steps: Number of steps with a rollout.
        groups: Number of groups, one a step and prompt.
        images: Number of images.
        changed_winners: Groups in which none of the best images is among the best any more.
        rank_correlation: Kendall's tau-b of the totals, mean over the groups that are flat neither
            before nor after; None where there is no such group.
        ranked_groups: The number of those groups.
        flat_before: Groups whose images all had the same total, and so taught nothing.
        flat_after: The same in the rescoring.
        terms: One a term, in the order of the R axis.
        gaining: Images that gain most advantage, the most first.
        losing: Images that lose most advantage, the most first.
        rare_terms: Lines on terms that apply to few of the prompts.
    """

    changes: tuple[SettingChange, ...]
    steps: int
    groups: int
    images: int
    changed_winners: int
    rank_correlation: float | None
    ranked_groups: int
    flat_before: int
    flat_after: int
    terms: tuple[TermChange, ...]
    gaining: tuple[MovedImage, ...]
    losing: tuple[MovedImage, ...]
    rare_terms: tuple[str, ...] = ()
