from __future__ import annotations

import pytest
from hydra.errors import ConfigCompositionException
from omegaconf.errors import InterpolationKeyError

from glm_grpo.errors import CheckpointError, DataError, ModelError, StorageError
from glm_grpo.present import expected_errors_explained, run_hydra_application
from rewards.types import RewardError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("line 3 is empty"), 2),
        (CheckpointError("another config"), 2),
        (ModelError("no weights"), 1),
        (StorageError("no space left"), 1),
        (RewardError("ocr failed"), 1),
        (ConfigCompositionException("Could not override"), 2),
        (InterpolationKeyError("no such key"), 2),
    ],
)
def test_expected_errors_end_with_their_message_and_exit_code(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught, expected_errors_explained():
        raise error
    assert caught.value.code == code
    printed = capsys.readouterr().err
    assert str(error) in printed
    assert "Traceback" not in printed


def test_ctrl_c_ends_as_in_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, expected_errors_explained():
        raise KeyboardInterrupt
    assert caught.value.code == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def test_defects_keep_their_traceback() -> None:
    with pytest.raises(KeyError, match="defect"), expected_errors_explained():
        raise KeyError("defect")


def test_run_hydra_application_explains_what_the_application_raises(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def application() -> None:
        raise ConfigCompositionException(
            "Could not override 'optim.lerning_rate'.\n"
            "To append to your config use +optim.lerning_rate=1"
        )

    with pytest.raises(SystemExit):
        run_hydra_application(application)
    assert "did you mean optim.learning_rate?" in capsys.readouterr().err
