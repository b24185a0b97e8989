"""`glm-grpo gallery`: write a run's gallery again from its tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from glm_grpo.errors import CheckpointError, StorageError
from glm_grpo.gallery import write_beside, write_gallery
from glm_grpo.gallery.archive import write_archive
from glm_grpo.gallery.contact_sheet import write_contact_sheet
from glm_grpo.gallery.film import write_film
from glm_grpo.output import printable
from glm_grpo.report.compare.beside import match_runs
from glm_grpo.run.folder import RunFolder, is_read_only
from glm_grpo.run.summaries import summarise
from glm_grpo.run.tables import SummaryRow

_SHEET_COLUMNS = 8


def rewrite_gallery(
    run: Path,
    *,
    beside: Sequence[Path] | None,
    sheet: Path | None,
    archive: Path | None,
    film: Path | None,
    prompt_id: str | None,
) -> Iterator[Path]:
    """Writes the gallery, and where asked for a picture of the run, a film and a ZIP.

    Args:
        run: Its folder.
        beside: Other runs that the gallery shows from now on; None leaves those it shows.
        sheet: A PNG of the run.
        archive: A ZIP of gallery and pictures.
        film: A GIF or WebP of one prompt through the steps.
        prompt_id: Of the film; the first held-out prompt without.

    Yields:
        The path of each once it is written.

    Raises:
        CheckpointError: The folder holds no run.
        ConfigError: The run has no prompt of that identifier, or another run cannot be shown
            beside it.
        StorageError: It cannot be read or written; not where nothing may be written and there is a
            gallery already, which stays as it is.
    """
    folder = RunFolder(run)
    _refuse_no_run(folder)
    if beside is not None:
        write_beside(folder, match_runs(run, beside) if beside else ())
    yield _renew(folder)
    if sheet is not None:
        write_contact_sheet(folder, sheet, columns=_SHEET_COLUMNS)
        yield sheet
    if film is not None:
        write_film(folder, film, prompt_id=prompt_id)
        yield film
    if archive is not None:
        write_archive(folder, archive)
        yield archive


def _renew(folder: RunFolder) -> Path:
    """Of a run that cannot be written to, the gallery stays what it was."""
    try:
        return write_gallery(folder, _summarise(folder))
    except StorageError as error:
        if not is_read_only(error) or not folder.gallery_path.is_file():
            raise
        sys.stderr.write(
            f"{printable(str(folder.path))} cannot be written to: its gallery is shown as it is, "
            "not renewed\n"
        )
        return folder.gallery_path


def _refuse_no_run(folder: RunFolder) -> None:
    # Not its config.yaml alone: the gallery of a run that lost it shows the rest.
    signs = (folder.config_path, folder.metrics_path, folder.rollouts_dir, folder.evaluations_dir)
    if not any(path.exists() for path in signs):
        raise CheckpointError(
            f"{folder.path} holds no run (neither config.yaml nor metrics.jsonl, rollouts/ or "
            "evaluations/); give the folder of a run, such as outputs/<date>/<time>"
        )


def _summarise(folder: RunFolder) -> list[SummaryRow]:
    """Before against after; without, where an evaluation is damaged, of which the pages tell."""
    try:
        return summarise(folder)
    except StorageError as error:
        sys.stderr.write(f"no before and after: {printable(str(error))}\n")
        return []
