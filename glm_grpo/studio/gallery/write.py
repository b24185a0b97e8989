"""Write the gallery of a run: a folder of static files that opens from disk."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from glm_grpo.errors import StorageError
from glm_grpo.run.folder import RunFolder, remove, step_of, write_atomically
from glm_grpo.run.summaries import summarise
from glm_grpo.run.tables import SummaryRow
from glm_grpo.studio.gallery.before_after import write_before_after, write_report_of_base
from glm_grpo.studio.gallery.data import (
    RunContents,
    chunk_key,
    credit_data,
    credit_key,
    evaluation_data,
    evaluation_key,
    image_paths_in,
    is_of_base,
    read_records,
    run_data,
    steps_data,
)
from glm_grpo.studio.gallery.pages import render_page
from glm_grpo.studio.gallery.thumbnails import make_thumbnails

_UNSAFE = re.compile("[<\u2028\u2029\ud800-\udfff]")

_RUN_KEY = "run"
_KEY = re.compile(r"(?:steps|evaluation|credit)-\d{6,}")
"""Pattern of the results of `chunk_key`, `evaluation_key` and `credit_key`."""


def to_script(key: str, value: Mapping[str, Any]) -> bytes:
    """Make a script that passes a value to the page: one call, `glmGallery.receive(key, value)`.

    No text in the value can end the call or the script element: `<` and the line separators U+2028
    and U+2029 are escaped. Lone surrogates, which have no UTF-8 form and are invalid in an address,
    become U+FFFD.

    Args:
        key: Name by which the page requests the value.
        value: JSON values; numbers must be finite.

    Raises:
        ValueError: A number is not finite.
    """
    arguments = ", ".join(
        json.dumps(argument, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        for argument in (key, value)
    )
    return f"glmGallery.receive({_UNSAFE.sub(_escape, arguments)});\n".encode()


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    return "\ufffd" if "\ud800" <= character <= "\udfff" else f"\\u{ord(character):04x}"


def refresh_gallery(folder: RunFolder, step: int | None) -> None:
    """Show what a training run stored; the run calls this.

    Args:
        step: Step or evaluation stored last; None: the run resumes or ends.
    """
    if step is not None:
        update_gallery(folder, step)
        return
    summary: Sequence[SummaryRow] = ()
    # The page reports an evaluation that cannot be read.
    with suppress(StorageError):
        summary = summarise(folder)
    write_gallery(folder, summary)


def write_gallery(folder: RunFolder, summary: Sequence[SummaryRow]) -> Path:
    """Rewrite the whole gallery from the stored data, and remove outdated files.

    The gallery needs no server and no network. The page reports whatever cannot be read.

    Args:
        folder: Run folder, even of a crashed or running run.
        summary: Comparison of before and after, one row per term and one for the total; may be
            empty.

    Returns:
        Path of the page.
    """
    records = read_records(folder)
    _write_assets(folder)
    for key in records.chunks:
        _write_steps(records, key)
    for step in records.evaluations:
        _write_evaluation(records, step)
    run = run_data(records, summary)
    _write_script(folder, _RUN_KEY, run)
    if is_of_base(folder) and not records.problems:
        write_report_of_base(folder)
    else:
        write_before_after(folder, summary)
    write_atomically(folder.gallery_path, render_page("gallery.html.j2", name=run["name"]))
    # Read again, because a running run has recorded more by now.
    _remove_outdated(read_records(folder))
    return folder.gallery_path


def update_gallery(folder: RunFolder, step: int) -> None:
    """Update a gallery after a step or an evaluation was recorded.

    Writes the data file of the step, its missing thumbnails, new evaluations and the list of all
    files. With an evaluation, also writes the page of before and after, without its intervals.
    Writes everything if there is no gallery yet.

    Args:
        step: Step recorded last; 0 for the evaluation before the first step.
    """
    if not folder.gallery_path.exists():
        write_gallery(folder, ())
        return
    records = read_records(folder)
    key = chunk_key(step)
    if key in records.chunks:
        _write_steps(records, key)
    added = [evaluated for evaluated in records.evaluations if _is_added(folder, evaluated, step)]
    for evaluated in added:
        _write_evaluation(records, evaluated)
    _write_script(folder, _RUN_KEY, run_data(records))
    if added:
        write_before_after(folder, ())


def _is_added(folder: RunFolder, evaluated: int, step: int) -> bool:
    return evaluated == step or not _script_path(folder, evaluation_key(evaluated)).exists()


def _write_steps(records: RunContents, key: str) -> None:
    data = steps_data(records, key)
    make_thumbnails(records.folder, image_paths_in(data["steps"]))
    for entry in data["steps"]:
        # Files of their own: views that read all steps do without them.
        credit = credit_data(records, entry["step"]) if "groups" in entry else None
        if credit is not None:
            _write_script(records.folder, credit_key(entry["step"]), credit)
            for group in entry["groups"]:
                group["credit"] = credit_key(entry["step"])
    _write_script(records.folder, key, data)


def _write_evaluation(records: RunContents, step: int) -> None:
    data = evaluation_data(records, step)
    make_thumbnails(records.folder, image_paths_in([data]))
    _write_script(records.folder, evaluation_key(step), data)


def _write_script(folder: RunFolder, key: str, data: dict[str, Any]) -> None:
    write_atomically(_script_path(folder, key), to_script(key, data))


def _script_path(folder: RunFolder, key: str) -> Path:
    return folder.path / f"gallery/data/{key}.js"


def _write_assets(folder: RunFolder) -> None:
    """Write the scripts and styles of the page, and remove those of other versions."""
    directory = folder.path / "gallery/assets"
    assets = dict(_files_below(resources.files("glm_grpo.studio.gallery") / "static"))
    for name, content in assets.items():
        path = folder.path / f"gallery/assets/{name}"
        if not path.is_file() or path.read_bytes() != content:
            write_atomically(path, content)
    for path in [path for path in directory.rglob("*") if path.is_file()]:
        if path.relative_to(directory).as_posix() not in assets:
            remove(path)


def _files_below(directory: Traversable, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    for entry in directory.iterdir():
        if entry.is_dir():
            yield from _files_below(entry, f"{prefix}{entry.name}/")
        else:
            yield f"{prefix}{entry.name}", entry.read_bytes()


def _remove_outdated(records: RunContents) -> None:
    """Remove files of steps that no longer exist, as after resuming at an earlier step."""
    folder = records.folder
    rollouts = {step for steps in records.chunks.values() for step in steps}
    keys = {*records.chunks, *map(evaluation_key, records.evaluations), *map(credit_key, rollouts)}
    for path in sorted((folder.path / "gallery/data").glob("*.js")):
        if _KEY.fullmatch(path.stem) and path.stem not in keys:
            remove(path)
    kept = {f"step-{step:06d}" for step in rollouts}
    kept |= {f"eval-{step:06d}" for step in records.evaluations}
    for path in sorted((folder.path / "gallery/thumbs").glob("*")):
        if step_of(path) is not None and path.name not in kept:
            remove(path)
