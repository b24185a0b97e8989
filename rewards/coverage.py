"""Check prompts against the terms of a reward: whether one applies, and which apply to few."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rewards.score import Term
from rewards.texts import find_quoted_texts, has_idle_marks
from rewards.types import Prompt, RewardError

_MOST_NAMED = 3
"""Largest number of prompts that a line names."""
_LONGEST_SHOWN = 60
"""Characters shown of a prompt in a line."""


def check_prompts(
    terms: Sequence[Term],
    prompts: Iterable[Prompt],
    *,
    set_name: str = "prompts",
    is_training: bool = False,
) -> list[str]:
    """Refuse prompts that no term can score, before anything is sampled.

    Args:
        prompts: Prompts to check; each is accessed once, which loads its target image.
        set_name: Name of the prompts in the lines, such as `training prompts`.
        is_training: Whether they are training prompts, which terms with `when: evaluation`
            never see.

    Returns:
        Lines on terms that apply to few of them (see `describe_rare_terms`), terms whose
        `prompt_ids` matches none, and prompts with quotation marks that ask for nothing.

    Raises:
        RewardError: No term with a nonzero weight applies to a prompt, or one applies but
            cannot score it.
    """
    terms = [term for term in terms if term.is_trained_on or not is_training]
    weighted = [term for term in terms if term.weight != 0]
    # For each term, the prompts to which it does not apply, by name.
    others: dict[str, list[str]] = {term.name: [] for term in terms}
    idle, total = [], 0
    for prompt in prompts:
        # Ask every term, even those that are only watched: one may refuse the prompt.
        applicable = [term for term in terms if term.applies_to(prompt)]
        if not any(term in weighted for term in applicable):
            names = [term.name for term in weighted]
            raise RewardError(describe_uncovered(prompt.prompt_id, prompt.prompt, names))
        total += 1
        named = f"{prompt.prompt_id} ({prompt.prompt[:_LONGEST_SHOWN]!r})"
        for term in terms:
            if term not in applicable:
                others[term.name].append(named)
        # Explicit texts are what the prompt asks for, whatever it quotes.
        is_as_quoted = prompt.texts == find_quoted_texts(prompt.prompt)
        if is_as_quoted and has_idle_marks(prompt.prompt):
            idle.append(named)
    weights = {term.name: term.weight for term in terms}
    counts = {name: total - len(lacking) for name, lacking in others.items()}
    first = {name: _name_first(lacking) for name, lacking in others.items()}
    lines = describe_rare_terms(weights, counts, total, set_name=set_name, others=first)
    if idle:
        lines.append(
            f"unpaired or empty quotation marks in {len(idle)} of the {total} {set_name}: "
            f"{_name_first(idle)}; close them, or give `text`"
        )
    unmatched = [
        f"reward.terms.{term.name}.prompt_ids is {term.prompt_ids!r}: none of the {set_name} that "
        "it could apply to has such an id"
        for term in terms
        if term.prompt_ids != "*" and counts[term.name] == 0
    ]
    return lines + unmatched


def describe_uncovered(prompt_id: str, caption: str, names: Iterable[str]) -> str:
    """Describe a prompt that no term can score.

    Args:
        names: Names of the terms with a weight.
    """
    return (
        f"prompt {prompt_id} ({caption!r}) cannot be rewarded: none of the terms with a weight "
        f"({', '.join(names)}) applies to it. Give it a target image (lpips, ssim), a text in "
        "quotation marks (ocr) or objects in `include` (composition), remove it, or add a term "
        "that applies to every prompt (clip_score)"
    )


def describe_rare_terms(
    weights: Mapping[str, float],
    counts: Mapping[str, int],
    total: int,
    *,
    set_name: str,
    others: Mapping[str, str] | None = None,
) -> list[str]:
    """Name the weighted terms that apply to none or to fewer than half of the prompts.

    Where a term does not apply, its weight goes to the others, so the actual reward differs from
    what its weights suggest.

    Args:
        counts: Number of prompts to which each term applies.
        set_name: Name of the prompts, such as `training prompts`.
        others: For terms that apply to some prompts, a few of those to which they do not.

    Returns:
        A line for each number of prompts, such as `lpips and ssim (60% of the weight) apply to
        none of the 12 training prompts`; the rarest terms first.
    """
    sizes = {name: abs(weight) for name, weight in weights.items() if weight != 0}
    lines = []
    for count in sorted({counts[name] for name in sizes if 2 * counts[name] < total}):
        names = [name for name in sizes if counts[name] == count]
        listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        share = sum(sizes[name] for name in names) / sum(sizes.values())
        verb = "apply" if len(names) > 1 else "applies"
        some = f"{count or 'none'} of the {total} {set_name}"
        line = f"{listed} ({share:.0%} of the weight) {verb} to {some}"
        # Terms in one line may be missing for different prompts; name those missing for all of
        # them.
        named = {others[name] for name in names} if others and count else set()
        lines.append(f"{line}; not to {named.pop()}" if len(named) == 1 else line)
    return lines


def _name_first(prompts: Sequence[str]) -> str:
    left_out = len(prompts) - _MOST_NAMED
    return ", ".join(prompts[:_MOST_NAMED]) + (f" and {left_out} more" if left_out > 0 else "")
