from __future__ import annotations

from pathlib import Path

import pytest

from glm_grpo.config import compose_config, with_whole_weights
from glm_grpo.config.root import Config
from glm_grpo.errors import ConfigError
from glm_grpo.search_path import PACKAGED_CONFIGS, may_hold_weights
from rewards.problems import known_keys
from rewards.terms import KINDS


def test_configs_of_the_package_are_found_from_any_folder(
    configs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert compose_config(None, None, ["run_dir=r"]) == compose_config(
        configs_dir, "tiny", ["run_dir=r"]
    )


def test_a_folder_of_ones_own_builds_on_the_package_and_wins_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    (own / "loss").mkdir(parents=True)
    (own / "config.yaml").write_text("defaults: [tiny, _self_]\ntrain: {steps: 3}\n")
    (own / "data.yaml").write_text(
        "defaults: [tiny, _self_]\ndata: {path: '${config_dir:}/prompts.txt'}\n"
    )
    (own / "loss" / "clipped.yaml").write_text("defaults: [gspo, _self_]\nclip_high: 0.5\n")
    monkeypatch.chdir(tmp_path)

    config = compose_config(Path("own"), None)

    assert config.train.steps == 3
    # Beside it, so that it goes for `clipped`; its own base is of the package.
    assert config.loss.clip_high == 0.5
    assert compose_config(Path("own"), "data").data.path == f"{own}/prompts.txt"
    assert compose_config(Path("own"), "tiny").train.steps == 40
    with pytest.raises(
        ConfigError, match=r"'confg'. Did you mean config\? There are config, data, glm"
    ):
        compose_config(Path("own"), "confg")


def test_a_single_folder_of_configs_is_one(tmp_path: Path) -> None:
    (tmp_path / "my-run").mkdir()
    (tmp_path / "my-run" / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"mean my-run\? There is my-run in "):
        compose_config(tmp_path / "my-rnu", None)


def test_a_folder_without_a_config_of_its_own_begins_with_tiny(tmp_path: Path) -> None:
    assert compose_config(tmp_path, None).model.path == "tiny"


@pytest.mark.parametrize(
    ("word", "whole"),
    [
        ("ocr=0.5", "reward.terms.ocr.weight=0.5"),
        ("clip_score=0.1,0.3", "reward.terms.clip_score.weight=0.1,0.3"),
        ("exact_word=1", "reward.terms.exact_word.weight=1"),
        ("ocr=choice(0.1,0.5)", "reward.terms.ocr.weight=choice(0.1,0.5)"),
        ("ocr=null", "reward.terms.ocr=null"),
        # Keys, groups, other forms, and what is no term.
        ("offload=none", None),
        ("loss=gspo", None),
        ("reward=text", None),
        ("+ocr=0.5", None),
        ("train.steps=3", None),
        ("--config-dir=own", None),
    ],
)
def test_a_terms_name_stands_for_its_weight(word: str, whole: str | None) -> None:
    assert with_whole_weights([word], None, "tiny_edit") == [whole or word]


@pytest.mark.parametrize("word", ["ocr=null", "ocr=choice(0.1,0.5)", "ocr=-1"])
def test_words_that_may_be_of_terms_are_looked_at(word: str) -> None:
    assert may_hold_weights([word])
    assert not may_hold_weights(["offload=none", "reward=text", "run_dir=null-1", "-m"])


def test_a_term_of_ones_own_is_looked_up_in_the_config_at_hand() -> None:
    assert (
        compose_config(None, "tiny_edit", ["exact_word=0.5"]).reward.weights()["exact_word"] == 0.5
    )
    with pytest.raises(ConfigError, match=r"exact_word = '0.5'\s+rule:\s+is not a key"):
        compose_config(None, "tiny", ["exact_word=0.5"])


def test_no_kind_of_term_is_called_like_a_key_or_a_group() -> None:
    groups = {path.name for path in PACKAGED_CONFIGS.iterdir() if path.is_dir()}
    assert not (groups | {key.partition(".")[0] for key in known_keys(Config)}) & {*KINDS}
