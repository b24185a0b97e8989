from __future__ import annotations

from pathlib import Path

import pytest

from glm_grpo.config import Config, compose_config
from glm_grpo.data.places import check_prompt_places
from glm_grpo.errors import DataError


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Of a run whose prompts are to be read from promts.txt; prompts.txt is beside it."""
    (tmp_path / "prompts.txt").write_text("a sign\n")
    monkeypatch.chdir(tmp_path)
    return compose_config(None, "tiny", ["data.path=promts.txt"])


def test_a_missing_prompts_file_is_named_with_its_folder_and_what_was_meant(
    tmp_path: Path, config: Config
) -> None:
    with pytest.raises(DataError) as raised:
        check_prompt_places(config, None)
    assert str(raised.value) == (
        f"data.path: promts.txt: no such file or folder in {tmp_path}; did you mean prompts.txt?"
    )


def test_a_missing_prompts_file_is_found_in_the_folder_of_the_config(
    tmp_path: Path, config: Config
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "promts.txt").write_text("a sign\n")
    with pytest.raises(DataError, match=r"own.*\$\{config_dir:\}/promts\.txt"):
        check_prompt_places(config, own)


@pytest.mark.parametrize("path", ["prompts.txt", "owner/data", "tiny:train"])
def test_what_is_there_or_cannot_be_told_is_left_to_the_readers(config: Config, path: str) -> None:
    data = config.data.model_copy(update={"path": path})
    check_prompt_places(config.model_copy(update={"data": data}), None)
