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

LONG = (
    "benchmarks/test_smallest.py::test_overlap",
    "benchmarks/test_smallest.py::test_step",
    "benchmarks/test_smallest.py::test_update",
    "benchmarks/test_soak.py::test_watch_run_sees_every_step_of_a_real_run",
    "end_to_end/distributed/test_copies.py::test_a_killed_process_ends_the_others",
    "end_to_end/distributed/test_copies.py::test_two_processes_learn_target_pictures_as_one",
    "end_to_end/distributed/test_copies.py::test_two_processes_replace_flat_groups_as_one",
    "end_to_end/distributed/test_edits.py",
    "end_to_end/distributed/test_failures.py::test_a_launch_through_deepspeed",
    "end_to_end/distributed/test_failures.py::test_a_term_that_fails_in_one_process",
    "end_to_end/distributed/test_failures.py::test_records_that_cannot_be_written",
    "end_to_end/distributed/test_shards.py::test_one_process_goes_on",
    "end_to_end/distributed/test_shards.py::test_shards_go_on",
    "end_to_end/distributed/test_stop.py",
    "end_to_end/processes/test_damaged_checkpoints.py::"
    "test_damaged_checkpoint_is_named_and_the_one_before_it_used[flipped",
    "end_to_end/processes/test_full_disk.py::"
    "test_folder_that_becomes_read_only_ends_in_one_line_and_the_run_goes_on_later[open metrics",
    "end_to_end/processes/test_full_disk.py::"
    "test_full_disk_ends_in_one_line_and_the_run_goes_on_when_there_is_space[open ",
    "end_to_end/processes/test_kills.py::test_run_killed_at_random_moments",
    "end_to_end/processes/test_kills.py::"
    "test_run_killed_before_a_change_goes_on_to_equal_results[open ",
    "end_to_end/processes/test_kills.py::"
    "test_run_killed_before_a_change_goes_on_to_equal_results[rename .metrics",
    "end_to_end/processes/test_signals.py::test_second_signal_ends_the_run_at_once[table",
    "end_to_end/processes/test_signals.py::test_signal_while_the_last_page_is_written",
    "end_to_end/processes/test_signals.py::"
    "test_signal_while_the_model_loads_ends_the_run_at_once[TERM",
    "end_to_end/processes/test_two_runs.py::test_auto_of_a_later_day",
    "end_to_end/processes/test_two_runs.py::"
    "test_second_run_is_refused_and_changes_nothing[train.resume=null",
    "end_to_end/test_continuation.py::test_stopped_and_resumed_run_equals_an_uninterrupted_one[15]",
    "end_to_end/test_evaluation_totals.py::test_a_run_that_resumes_goes_on_with_the_same_scale",
    "end_to_end/test_evaluation_totals.py::"
    "test_totals_rise_with_the_scores_and_the_best_checkpoint_is_the_best[1]",
    "end_to_end/test_failing_scorers.py::test_a_run_whose_scorer_is_killed_in_a_step",
    "end_to_end/test_failing_scorers.py::test_a_run_whose_term_hangs_ends_with_all_its_threads",
    "end_to_end/test_failing_scorers.py::test_a_term_that_sets_seeds_and_threads",
    "end_to_end/test_failures.py::"
    "test_a_term_that_fails_in_an_evaluation_loses_neither_the_step_nor_the_evaluation[2]",
    "end_to_end/test_hacking.py::test_loop_stops_when_a_term_of_evaluations_falls",
    "end_to_end/test_learning.py::test_kl_in_the_reward",
    "end_to_end/test_learning.py::test_loop_stays_near_the_reference",
    "end_to_end/test_moving_average.py::test_a_resumed_run",
    "end_to_end/test_moving_weights.py::test_a_resumed_run",
    "end_to_end/test_python_api.py::"
    "test_a_run_goes_on_without_the_one_it_began_with_where_it_has_all_of_it",
    "end_to_end/test_secrets.py::test_run_whose_judge_repeats_the_key",
    "end_to_end/test_target_pictures.py::test_the_run_that_another_began_with_may_go_on_meanwhile",
    "site/test_tutorials.py::test_page_runs_from_top_to_bottom[docs/tutorials/custom_reward.md]",
    "site/test_tutorials.py::test_page_runs_from_top_to_bottom[docs/tutorials/edits.md]",
    "site/test_tutorials.py::test_page_runs_from_top_to_bottom[docs/tutorials/own_prompts.md]",
    "training/asynchronous/test_ray.py::test_a_collector_killed_at_random",
    "training/asynchronous/test_ray.py::test_a_term_that_fails_in_a_collector",
    "training/asynchronous/test_ray.py::test_collectors_listen_to_this_machine_alone",
    "training/asynchronous/test_ray.py::test_learner_killed",
    "training/asynchronous/test_ray.py::test_stopped_run_leaves_no_process",
)
"""Of those, what is left to `pytest -m long`, by measured time: further places of what another test
shows, and runs of several processes that take a minute. Tests marked where they are written are
left to it, too."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow, and skip what needs an accelerator where there is none."""
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name.startswith(SLOW) and not name.startswith(FAST):
            item.add_marker(pytest.mark.slow)
        if name.startswith(LONG):
            item.add_marker(pytest.mark.long)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no accelerator")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
