"""What all tests share: shapes are checked while they run, and where the test assets are."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook

from tests.pages import Page
from tests.programs import Programs

# Before anything imports the packages: only modules that are loaded afterwards are checked. The
# others hardly know tensors, and to check them takes a third of the time that imports take.
CHECKED = ("collectors", "data", "grpo", "models", "tiny", "training", "types")
install_import_hook([*(f"glm_grpo.{name}" for name in CHECKED), "rewards"], "beartype.beartype")

# A busy machine makes no example wrong.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

ROOT = Path(__file__).resolve().parents[1]

# One thread, here and in processes that tests begin: how sums are rounded depends on their number.
# Test workers run side by side, and the embedded model gains little from more.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def assets_dir() -> Path:
    """Folder of real weights, images and prompts that are not part of the project."""
    name = os.environ.get("GLM_GRPO_ASSETS")
    if name is None or not Path(name).is_dir():
        pytest.skip(f"GLM_GRPO_ASSETS is {name}: it names no folder of test assets")
    return Path(name)


@pytest.fixture(scope="session")
def configs_dir() -> Path:
    """The project's `configs/`."""
    return ROOT / "configs"


@pytest.fixture(scope="session")
def read_page() -> Callable[[Path], Page]:
    """Reads a page that was written, strictly."""
    return Page


@pytest.fixture
def make_read_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Lets no file below a folder be written; permissions would not stop root."""
    opened = Path.open

    def make(folder: Path) -> None:
        def refuse(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
            if "r" not in mode and path.is_relative_to(folder):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return opened(path, mode, *args, **options)

        monkeypatch.setattr(Path, "open", refuse)

    return make


@pytest.fixture
def own_defaults() -> Iterator[None]:
    """Lets a test change torch's defaults."""
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """Starts `python ...` in a fraction of a second."""
    programs = Programs(tmp_path_factory.mktemp("programs"))
    yield programs
    programs.close()


@pytest.fixture(scope="session")
def easyocr_weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that EASYOCR_MODULE_PATH names: EasyOCR's published weights for English."""
    # It takes seconds to import.
    import easyocr.easyocr  # noqa: PLC0415
    from easyocr_en_models import model_dir  # noqa: PLC0415

    # A folder that EasyOCR can write to, as it makes others beside that of the weights.
    folder = tmp_path_factory.mktemp("easyocr")
    (folder / "model").symlink_to(model_dir())
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("EASYOCR_MODULE_PATH", str(folder))
        # Which it read when it was imported.
        monkeypatch.setattr(easyocr.easyocr, "MODULE_PATH", str(folder))
        yield folder


@pytest.fixture
def small_preview(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the preview 2 x 2 tokens instead of 16 x 16: sampling takes a fraction of the time.

    For tests of the loop. Positions, parity with stock classes and learning are tested with the
    true size.
    """
    monkeypatch.setattr("glm_grpo.models.glm_image.token_grid._PREVIEW_SIDE", 2)


LONGEST = ("tests/end_to_end/", "tests/collectors/")
"""Begun first, so that no worker waits for another at the end."""

LAST = "tests/browser/"
"""A browser, once open, leaves its event loop in the thread."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what takes longest first, browsers last, and skip what needs a missing accelerator."""
    items.sort(key=lambda item: (item.nodeid.startswith(LAST), not item.nodeid.startswith(LONGEST)))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no accelerator")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
