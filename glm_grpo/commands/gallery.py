"""`glm-grpo gallery`: rewrite a run's gallery from its tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from glm_grpo.errors import StorageError
from glm_grpo.output import printable
from glm_grpo.run.config import refuse_no_run
from glm_grpo.run.folder import RunFolder, is_read_only
from glm_grpo.run.summaries import summarise
from glm_grpo.run.tables import SummaryRow
from glm_grpo.studio.gallery import write_gallery
from glm_grpo.studio.gallery.contact_sheet import write_contact_sheet

_SHEET_COLUMNS = 8


def rewrite_gallery(
    run: Path,
    *,
    sheet: Path | None,
) -> Iterator[Path]:
    """Write the gallery and, on request, an image of the run.

    Args:
        run: Run folder.
        sheet: Path for a PNG of the run.

    Yields:
        The path of each output after it is written.
    """
    folder = RunFolder(run)
    refuse_no_run(folder)
    yield _renew(folder)
    if sheet is not None:
        write_contact_sheet(folder, sheet, columns=_SHEET_COLUMNS)
        yield sheet


def _renew(folder: RunFolder) -> Path:
    """Rewrite the gallery; if the run is read-only, keep the existing one."""
    try:
        return write_gallery(folder, _summarise(folder))
    except StorageError as error:
        if not is_read_only(error) or not folder.gallery_path.is_file():
            raise
        sys.stderr.write(
            f"{printable(str(folder.path))} is not writable: its gallery is shown without an "
            "update\n"
        )
        return folder.gallery_path


def _summarise(folder: RunFolder) -> list[SummaryRow]:
    """Summarise before and after; empty if an evaluation is damaged, which the pages report."""
    try:
        return summarise(folder)
    except StorageError as error:
        sys.stderr.write(f"before and after cannot be compared: {printable(str(error))}\n")
        return []
