from __future__ import annotations

from pathlib import Path

import pytest

from glm_grpo.config import Config, compose_config, to_yaml
from glm_grpo.errors import ConfigError
from glm_grpo.storage import RunFolder
from glm_grpo.training.checkpoint import save_checkpoint
from glm_grpo.training.resume import open_run, read_config

CONFIGS = Path(__file__).parents[2] / "configs"


def compose(run_dir: Path) -> Config:
    overrides = ["train.steps=3", "train.resume=auto", f"run_dir={run_dir}"]
    return compose_config(CONFIGS, "tiny", overrides)


@pytest.fixture
def last_step_saved(tmp_path: Path) -> RunFolder:
    """A dated run with the checkpoint of its last step, 3, and no evaluation after it."""
    folder = RunFolder(tmp_path / "2026-01-01" / "10-00-00")
    folder.path.mkdir(parents=True)
    folder.config_path.write_text(to_yaml(compose(folder.path)))
    save_checkpoint(folder, step=3, tensors={}, metadata={})
    return folder


def test_open_run_goes_on_with_a_run_whose_last_evaluation_is_missing(
    tmp_path: Path, last_step_saved: RunFolder
) -> None:
    opened = open_run(compose(tmp_path / "2026-01-02" / "09-00-00"))
    assert opened.folder.path == last_step_saved.path
    assert opened.checkpoint is not None
    assert opened.checkpoint.step == 3


def test_open_run_begins_anew_beside_a_finished_run(
    tmp_path: Path, last_step_saved: RunFolder
) -> None:
    evaluation = last_step_saved.evaluation_path(3)
    evaluation.parent.mkdir()
    evaluation.touch()
    opened = open_run(compose(tmp_path / "2026-01-02" / "09-00-00"))
    assert opened.folder.path == tmp_path / "2026-01-02" / "09-00-00"
    assert opened.checkpoint is None


@pytest.mark.parametrize("content", [b"model: {path: '\xed\xa0\x80'}", b"rollout: [", b"", b"\0"])
def test_open_run_begins_anew_beside_a_run_whose_config_is_damaged(
    content: bytes, tmp_path: Path, last_step_saved: RunFolder
) -> None:
    last_step_saved.config_path.write_bytes(content)
    opened = open_run(compose(tmp_path / "2026-01-02" / "09-00-00"))
    assert opened.folder.path == tmp_path / "2026-01-02" / "09-00-00"


def test_a_config_that_is_not_utf8_is_refused_with_its_path(last_step_saved: RunFolder) -> None:
    last_step_saved.config_path.write_bytes(b"model: {path: '\xed\xa0\x80'}")
    with pytest.raises(ConfigError, match=r"config\.yaml is not UTF-8 .*byte 0xed.*restore it"):
        read_config(last_step_saved)
