"""What all tests share: shapes are checked while they run, and where the test assets are."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook

from tests.pages import Page

# Before anything imports the packages: only modules that are loaded afterwards are checked.
install_import_hook(["glm_grpo", "rewards"], "beartype.beartype")

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
    """Folder of real weights, pictures and prompts that are not part of the project."""
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


_PROCESS = Path("/proc/self")


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", (_PROCESS / "status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@pytest.fixture
def peak_memory() -> Callable[[Callable[[], object]], int]:
    """Runs an action and returns by how many bytes the process grew at the worst moment of it."""
    if not os.access(_PROCESS / "clear_refs", os.W_OK):
        pytest.skip("the system does not tell the peak of a process's memory")

    def measure(action: Callable[[], object]) -> int:
        gc.collect()
        # What was freed and kept for later use would hide as much of the growth.
        ctypes.CDLL(None).malloc_trim(0)
        (_PROCESS / "clear_refs").write_text("5")
        before = _status_bytes("VmRSS")
        action()
        return _status_bytes("VmHWM") - before

    return measure


SLOW = (
    "benchmarks/",
    "browser/",
    "config/test_bad_configs",
    "config/test_every_key",
    "end_to_end/",
    "gallery/test_damaged",
    "gallery/test_links",
    "gallery/test_server",
    "models/glm_image/test_export",
    "models/glm_image/test_memory",
    "models/glm_image/test_model_folder",
    "models/glm_image/test_quantization",
    "models/glm_image/test_shards",
    "plan/",
    "probe/test_probe",
    "rewards/remote/",
    "rewards/test_bad_pictures",
    "rewards/test_ocr_easyocr",
    "rewards/test_process",
    "rewards/test_vlm_judge",
    "run/test_stored_files",
    "scripts/",
    "site/test_commands",
    "site/test_site",
    "site/test_tutorials",
    "test_commands",
    "test_terminal",
    "test_train_errors",
    "tiny/",
    "training/asynchronous/test_ray",
    "training/data/test_bad_prompt",
    "training/distributed/test_strategy",
    "training/distributed/test_processes",
    "training/recording/test_progress",
)
"""Folders and files, below `tests/`, that `make test` leaves to `make test-all`, by measured time
(LOG.md has the slowest tests)."""

FAST = (
    "browser/test_real_run.py::test_views_show_the_pictures_of_a_real_run",
    "end_to_end/test_continuation.py::test_stopped_and_resumed_run_equals_an_uninterrupted_one[2]",
    "end_to_end/test_learning.py::test_loop_follows_the_sign_of_the_reward[1.0-1]",
    "end_to_end/test_minimal_grpo.py",
    "site/test_commands.py::test_commands_are_accepted[README.md]",
    "site/test_commands.py::test_commands_are_accepted[docs/start.md]",
)
"""Of those, what `make test` runs: a run that learns, one that resumes, a gallery in a browser,
the commands of the README."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow, and skip what needs an accelerator where there is none."""
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name.startswith(SLOW) and not name.startswith(FAST):
            item.add_marker(pytest.mark.slow)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no accelerator")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
