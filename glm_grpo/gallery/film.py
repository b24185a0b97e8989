"""Animate one prompt through the steps of a run, as a GIF or WebP."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from glm_grpo.errors import ConfigError
from glm_grpo.run.folder import RunFolder, read_picture, write_atomically
from glm_grpo.run.tables import evaluation_steps, read_evaluation, read_table, stored_steps

_SMALLEST, _LARGEST = 384, 768
"""Range in pixels of the longer side of a picture: smaller ones are enlarged by a whole factor,
larger ones are shrunk."""
_FRAME_MS, _LAST_MS = 700, 2500
"""Milliseconds for which each picture, and the last one, is shown."""
_CAPTION_HEIGHT = 36
_COLUMNS = ("step", "prompt_id", "sample", "total", "image")
_NAMED = 8
"""Largest number of prompts that an error names."""


@dataclass(frozen=True)
class Frame:
    """One picture of a film.

    Attributes:
        step: Step of the policy that made it.
        total: Its total reward.
        image: Path relative to the run folder.
    """

    step: int
    total: float
    image: str


def write_film(folder: RunFolder, path: Path, *, prompt_id: str | None = None) -> None:
    """Write a prompt's pictures through the steps as an endless animation.

    For a held-out prompt, these are its first samples in every evaluation, drawn with the same
    seeds; for a training prompt, the samples with the highest total in every step that has the
    prompt.

    Args:
        folder: Run folder.
        path: Path ending in `.gif` or `.webp`, which selects the format; an earlier file is
            replaced.
        prompt_id: Id of a held-out or training prompt; None: the first held-out prompt.

    Raises:
        ConfigError: The run has no such prompt.
        StorageError: A table or a picture cannot be read, or the file cannot be written.
    """
    frames = [_draw(folder, frame) for frame in find_frames(folder, prompt_id)]
    first, *others = frames
    content = io.BytesIO()
    first.save(
        content,
        format=path.suffix.removeprefix(".").upper(),
        save_all=True,
        append_images=others,
        duration=[*[_FRAME_MS] * len(others), _LAST_MS],
        loop=0,
    )
    write_atomically(path, content.getvalue())


def find_frames(folder: RunFolder, prompt_id: str | None) -> list[Frame]:
    """Find the pictures of a prompt in step order, see `write_film`.

    Raises:
        ConfigError: The run has no such prompt.
        StorageError: A table cannot be read.
    """
    held_out = list(_held_out(folder))
    wanted = held_out[0][0] if prompt_id is None and held_out else prompt_id
    frames = [frame for name, frame in held_out if name == wanted]
    if not frames and wanted is not None:
        frames = list(_trained(folder, wanted))
    if not frames:
        raise ConfigError(_explain(prompt_id, list(dict.fromkeys(name for name, _ in held_out))))
    return frames


def _explain(prompt_id: str | None, held_out: list[str]) -> str:
    if prompt_id is None:
        return (
            "the run has no evaluation yet; set --prompt to the id of a training prompt, or wait "
            "for the first evaluation"
        )
    names = ", ".join(held_out[:_NAMED]) + (", ..." if len(held_out) > _NAMED else "")
    return (
        f"the run has no image of the prompt {prompt_id!r}; set --prompt to the id of a training "
        f"prompt or of a held-out one ({names or 'none yet'})"
    )


def _held_out(folder: RunFolder) -> Iterator[tuple[str, Frame]]:
    """First sample of every prompt in every evaluation."""
    for step in evaluation_steps(folder):
        for row in read_evaluation(folder, step, _COLUMNS).to_pylist():
            if row["sample"] == 0:
                yield row["prompt_id"], Frame(step, row["total"], row["image"])


def _trained(folder: RunFolder, prompt_id: str) -> Iterator[Frame]:
    """Best sample of a training prompt in every step that has it."""
    for step in stored_steps(folder.rollouts_dir):
        rows = read_table(folder.rollout_path(step), _COLUMNS).to_pylist()
        own = [row for row in rows if row["prompt_id"] == prompt_id]
        if own:
            best = max(own, key=lambda row: row["total"])
            yield Frame(step, best["total"], best["image"])


def _draw(folder: RunFolder, frame: Frame) -> Image.Image:
    """Draw a picture with its step and total below."""
    picture = read_picture(folder.picture(frame.image))
    longer = max(picture.size)
    if longer > _LARGEST:
        picture.thumbnail((_LARGEST, _LARGEST), reducing_gap=2.0)
    elif longer < _SMALLEST:
        factor = -(-_SMALLEST // longer)
        size = (picture.width * factor, picture.height * factor)
        picture = picture.resize(size, Image.Resampling.NEAREST)
    drawn = Image.new("RGB", (picture.width, picture.height + _CAPTION_HEIGHT), "white")
    drawn.paste(picture)
    ImageDraw.Draw(drawn).text(
        (10, picture.height + _CAPTION_HEIGHT // 2),
        f"step {frame.step}   total {frame.total:.3f}",
        fill="black",
        font=ImageFont.load_default(size=20),
        anchor="lm",
    )
    return drawn
