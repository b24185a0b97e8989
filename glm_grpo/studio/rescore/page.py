"""Show a rescoring in the terminal and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from glm_grpo.errors import StorageError
from glm_grpo.output import counted, printable
from glm_grpo.run.figures import Table
from glm_grpo.run.folder import RunFolder, is_read_only
from glm_grpo.studio.gallery.report import Pictures, Report, copy_tile, write_report
from glm_grpo.studio.rescore.rescore import SHOWN_DECIMALS, MovedImage, Rescoring, TermChange

_ELSEWHERE = Path("outputs/rescore")
_LONGEST_PROMPT = 36
"""Characters of a prompt that fit beside its figures into 80 columns."""


def print_rescoring(console: Console, folder: RunFolder, rescoring: Rescoring) -> None:
    """Print the tables of a rescoring: groups, terms and images."""
    for table in (*_list_tables(rescoring), *_image_tables(rescoring)):
        console.print(table)
    images = [image for _, some in _moved(rescoring) for image in some]
    if images:
        # Unbroken, however narrow the terminal, so that the path can be copied.
        line = f"images on the page: {len(images)}; the first: {folder.path / images[0].image}"
        console.print(Text(printable(line)), soft_wrap=True)


def write_rescoring(folder: RunFolder, rescoring: Rescoring) -> Path:
    """Write `rescore/index.html`: the tables, and the images that gain and that lose most.

    The page of a read-only run goes to `outputs/rescore/<name of the run>/`.

    Returns:
        Path of the page.

    Raises:
        StorageError: The page cannot be written.
    """
    try:
        return _write(folder, rescoring, folder.rescore_dir)
    except StorageError as error:
        if not is_read_only(error):
            raise
        return _write(folder, rescoring, _ELSEWHERE / folder.path.resolve().name)


def _write(folder: RunFolder, rescoring: Rescoring, directory: Path) -> Path:
    pictures = [
        Pictures(
            f"{change} most advantage",
            tuple(
                copy_tile(
                    folder.picture(image.image),
                    directory,
                    f"{change}-{number}",
                    f"{number}, step {image.step}: {_without_middle(image.prompt)}",
                    (
                        ("before", _signed(image.advantage_before)),
                        ("after", _signed(image.advantage_after)),
                    ),
                )
                for number, image in enumerate(images, start=1)
            ),
        )
        for change, images in _moved(rescoring)
    ]
    report = Report(
        title=f"{folder.path.resolve().name} with other weights",
        tables=_list_tables(rescoring),
        pictures=pictures,
        about_pictures="Below each image: its advantage with the old and with the new weights.",
    )
    return write_report(report, directory)


def _moved(rescoring: Rescoring) -> list[tuple[str, Sequence[MovedImage]]]:
    """Images that gain most, and images that lose most, if there are any."""
    moved = (("gain", rescoring.gaining), ("lose", rescoring.losing))
    return [(change, images) for change, images in moved if images]


def _list_tables(rescoring: Rescoring) -> list[Table]:
    unmoved = (
        "" if _moved(rescoring) else f"no advantage changes by {10**-SHOWN_DECIMALS:g} or more"
    )
    winners, groups, tau = rescoring.changed_winners, rescoring.groups, rescoring.rank_correlation
    ranked, are = rescoring.ranked_groups, "is" if rescoring.ranked_groups == 1 else "are"
    ranking = f"mean over {counted(ranked, 'group')} that {are} not flat"
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
                ("flat groups", f"{rescoring.flat_before} to {rescoring.flat_after}"),
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
