"""Show a rescoring in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from glm_grpo.output import counted, printable
from glm_grpo.run.figures import Table
from glm_grpo.run.folder import RunFolder
from glm_grpo.studio.rescore.rescore import SHOWN_DECIMALS, MovedImage, Rescoring, TermChange

_LONGEST_PROMPT = 36
"""Characters of a prompt that fit beside its figures into 80 columns."""


def print_rescoring(console: Console, folder: RunFolder, rescoring: Rescoring) -> None:
    """Print the tables of a rescoring: groups, terms and images."""
    for table in (*_list_tables(rescoring), *_image_tables(rescoring)):
        console.print(table)
    for change, images in _moved(rescoring):
        # Unbroken, however narrow the terminal, so that the path can be copied.
        line = f"the image that {change}s most: {folder.path / images[0].image}"
        console.print(Text(printable(line)), soft_wrap=True)


def _moved(rescoring: Rescoring) -> list[tuple[str, Sequence[MovedImage]]]:
    """Images that gain most, and images that lose most, if there are any."""
    moved = (("gain", rescoring.gaining), ("lose", rescoring.losing))
    return [(change, images) for change, images in moved if images]


def _list_tables(rescoring: Rescoring) -> list[Table]:
    unmoved = (
        "" if _moved(rescoring) else f"no advantage changes by {10**-SHOWN_DECIMALS:g} or more"
    )
    winners, groups, tau = rescoring.changed_winners, rescoring.groups, rescoring.rank_correlation
    ranking = f"mean over {counted(rescoring.ranked_groups, 'group')} whose totals differ"
    remarks = list(rescoring.rare_terms)
    shares = [round(each, 3) for term in rescoring.terms for each in _shares(term)]
    if min(shares) < 0:
        remarks.append(
            "a share below 0: the term pulls against the total, because others outweigh it"
        )
    terms = tuple(
        (
            *(term.name, f"{term.weight_before:g}", f"{term.weight_after:g}"),
            *(f"{share:z.3f}" for share in _shares(term)),
        )
        for term in rescoring.terms
    )
    return [
        Table(
            f"images {rescoring.images}, groups {groups}, steps {rescoring.steps}",
            ("what", "change"),
            (
                # Otherwise `rescore` has raised.
                ("totals and advantages with the run's own weights", "as stored, to the bit"),
                *(
                    (change.key, f"{change.before} to {change.after}")
                    for change in rescoring.changes
                ),
                ("groups whose winner changes", f"{winners} ({winners / groups:.1%})"),
                (
                    f"Kendall's tau-b inside groups, {ranking}",
                    "-" if tau is None else f"{tau:z.3f}",
                ),
                ("zero-std groups", f"{rescoring.zero_std_before} to {rescoring.zero_std_after}"),
            ),
            unmoved,
        ),
        Table(
            "share of the advantage's variance",
            ("term", "weight", "new weight", "share", "new share"),
            terms,
            "; ".join(remarks),
        ),
    ]


def _shares(term: TermChange) -> tuple[float, float]:
    return term.share_before, term.share_after


def _image_tables(rescoring: Rescoring) -> list[Table]:
    return [
        Table(
            f"images that {change} most advantage",
            ("image", "step", "sample", "before", "after"),
            tuple(
                (
                    f"{number}  {_without_middle(image.prompt)}",
                    str(image.step),
                    str(image.sample),
                    _signed(image.advantage_before),
                    _signed(image.advantage_after),
                )
                for number, image in enumerate(images, start=1)
            ),
        )
        for change, images in _moved(rescoring)
    ]


def _without_middle(prompt: str) -> str:
    """Shorten a prompt in the middle, because prompts of a set often begin alike."""
    if len(prompt) <= _LONGEST_PROMPT:
        return prompt
    half = _LONGEST_PROMPT // 2
    return f"{prompt[:half]}…{prompt[-half:]}"


def _signed(advantage: float) -> str:
    return f"{advantage:+z.{SHOWN_DECIMALS}f}"
