from __future__ import annotations

import logging
from pathlib import Path

import pytest

from glm_grpo.commands import run_training
from glm_grpo.config import compose_config
from glm_grpo.errors import ModelError


@pytest.mark.parametrize("resume", ["null", "auto"])
def test_run_training_says_where_it_writes_before_a_model_is_loaded(
    resume: str, tmp_path: Path, configs_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    overrides = [f"run_dir={folder}", f"model.path={tmp_path / 'no_model'}"]
    if resume == "auto":
        with pytest.raises(ModelError):
            run_training(compose_config(configs_dir, "tiny", overrides))
    caplog.clear()
    caplog.set_level(logging.INFO, logger="glm_grpo")
    with pytest.raises(ModelError):
        run_training(compose_config(configs_dir, "tiny", [*overrides, f"train.resume={resume}"]))
    said = [record.getMessage() for record in caplog.records]
    goes_on = [f"going on with {folder} from its start"] if resume == "auto" else []
    assert said == [
        *goes_on,
        f"run folder: {folder} (from the first evaluation on, gallery/index.html in it can be "
        "opened at any time)",
    ]
