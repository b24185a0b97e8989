"""The evaluation prompts as one table of text, numbers and pictures, for trackers to show.

It is bounded, because trackers may send it over a network at every evaluation: all that was drawn,
lossless and in full size, is in the run folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from glm_grpo.types import Evaluation

MAX_PROMPTS = 16
"""Prompts shown: the first ones, the same in every evaluation of a run."""
MAX_SAMPLES = 4
"""Pictures shown of each prompt, besides its target."""
MAX_SIDE = 256
"""Pixels; larger pictures are scaled down until their longer side is this."""

_DECIMALS = 6
"""Of scores; what float32 has beyond them is noise that only widens a column."""
_GAP = 4
"""White pixels between the pictures of a strip."""
_WHITE = (255, 255, 255)

Cell = Image.Image | str | float | int | None


@dataclass(frozen=True)
class EvaluationTable:
    """What a tracker shows of one evaluation.

    Attributes:
        columns: `prompt_id`, `prompt`, `sample`, `target` (absent where no prompt has one),
            `image`, `total`, the terms, and `<term> note` for the terms that say what they found.
        rows: One a picture, prompt by prompt, a cell for each column. A target, score or note that
            a prompt does not have is None.
        strips: For each prompt id its target, where it has one, and its samples side by side.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    strips: Mapping[str, Image.Image]


def tabulate(evaluation: Evaluation) -> EvaluationTable:
    """The first `MAX_PROMPTS` prompts of an evaluation with their first `MAX_SAMPLES` pictures."""
    prompts = evaluation.prompts[:MAX_PROMPTS]
    has_targets = any(prompt.target is not None for prompt in prompts)
    table = evaluation.rewards
    columns = (
        "prompt_id",
        "prompt",
        "sample",
        *(("target",) if has_targets else ()),
        "image",
        "total",
        *table.names,
        *(f"{name} note" for name in table.notes),
    )
    rows: list[tuple[Cell, ...]] = []
    strips = {}
    for index, prompt in enumerate(prompts):
        target = None if prompt.target is None else _picture(prompt.target)
        images = [_picture(pixels) for pixels in evaluation.images.pixels[index, :MAX_SAMPLES]]
        strips[prompt.prompt_id] = _strip([*([] if target is None else [target]), *images])
        identity = (prompt.prompt_id, prompt.prompt)
        for sample, image in enumerate(images):
            pictures = (target, image) if has_targets else (image,)
            measures = _measures(evaluation, index, sample)
            rows.append((*identity, sample, *pictures, *measures))
    return EvaluationTable(columns, tuple(rows), strips)


def to_markdown(table: EvaluationTable) -> str:
    """The table without its pictures."""
    shown = [index for index, name in enumerate(table.columns) if name not in ("target", "image")]
    lines = [[table.columns[index] for index in shown], ["---"] * len(shown)]
    lines += [[_to_text(row[index]) for index in shown] for row in table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _to_text(cell: Cell) -> str:
    """On one line, without the bar that would end a cell."""
    if isinstance(cell, float):
        return f"{cell:.3f}"
    return "" if cell is None else " ".join(str(cell).split()).replace("|", "\\|")


def _measures(evaluation: Evaluation, index: int, sample: int) -> list[Cell]:
    """Total, score of every term, and notes of one picture."""
    table = evaluation.rewards
    scores = table.raw[index, sample].tolist()
    applies = table.is_applicable[index].tolist()
    notes = [groups[index] for groups in table.notes.values()]
    return [
        round(evaluation.totals[index, sample].item(), _DECIMALS),
        *(
            round(score, _DECIMALS) if is_on else None
            for score, is_on in zip(scores, applies, strict=True)
        ),
        # A term that does not apply to the prompt has nothing to say of its pictures.
        *(group[sample] if group else None for group in notes),
    ]


def _picture(pixels: UInt8[Tensor, "3 H W"]) -> Image.Image:
    image = Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy())
    # Keeps the proportions, and leaves smaller pictures as they are.
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    return image


def _strip(pictures: list[Image.Image]) -> Image.Image:
    width = sum(picture.width for picture in pictures) + _GAP * (len(pictures) - 1)
    strip = Image.new("RGB", (width, max(picture.height for picture in pictures)), _WHITE)
    left = 0
    for picture in pictures:
        strip.paste(picture, (left, 0))
        left += picture.width + _GAP
    return strip
