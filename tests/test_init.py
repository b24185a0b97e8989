"""`glm-grpo init`: what it writes can be used as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from glm_grpo.cli import main
from glm_grpo.commands.init import init_folder, propose_configs
from glm_grpo.config import compose_config
from glm_grpo.data.prompts import load_prompts
from glm_grpo.errors import ConfigError
from glm_grpo.models.base import ReservedTokens
from glm_grpo.models.glm_image.prompt_inputs import find_glyph_texts
from glm_grpo.tiny import world
from rewards.terms.composition_rows import read_composition


@pytest.mark.parametrize(("name", "sources"), [("tiny", 0), ("glm_image_edit_80gb", 1)])
def test_init_writes_a_config_that_changes_nothing_but_the_prompts(
    name: str, sources: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    list(init_folder(Path("my-run"), name))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)

    config = compose_config(tmp_path / "my-run", None, ["run_dir=r"])

    paths = [str(tmp_path / "my-run" / file) for file in ("prompts.jsonl", "held_out.jsonl")]
    data = [f"data.path={paths[0]}", f"data.eval_path={paths[1]}"]
    assert config == compose_config(None, name, ["run_dir=r", *data])
    training, held_out = (
        load_prompts(path, height=128, width=128, reserved=ReservedTokens(), sources=sources)
        for path in paths
    )
    assert (len(training), len(held_out)) == (24, 16)
    assert not {training[row].texts for row in range(24)} & {
        held_out[row].texts for row in range(16)
    }
    first = held_out[0]
    assert first.texts == ("OPEN",)
    assert len(first.sources) == sources
    if not sources:
        # The embedded model was trained on such captions, and the target is lossless.
        (sign,) = [
            sign
            for sign in world.signs_of_words(world.HELD_OUT_WORDS, seed=2)
            if sign.word == "OPEN"
        ]
        assert first.prompt == world.caption(sign)
        assert first.target is not None
        assert first.target.equal(world.draw_sign(sign))


def test_init_writes_prompts_about_objects_for_a_model_that_draws_no_texts(tmp_path: Path) -> None:
    folder = tmp_path / "my-run"
    list(init_folder(folder, "janus_pro_1b_16gb"))
    config = compose_config(folder, None, ["run_dir=r"])
    assert set(config.reward.weights()) == {"pick_score", "clip_score"}
    training, held_out = (
        load_prompts(path, height=384, width=384, reserved=ReservedTokens())
        for path in (config.data.path, config.data.eval_path)
    )
    assert (len(training), len(held_out)) == (64, 16)
    captions = [{*each.captions()} for each in (training, held_out)]
    assert [len(each) for each in captions] == [64, 16]
    assert not captions[0] & captions[1]
    assert not any(training.texts())
    # As they are, they can be trained on with `reward=composition`.
    for prompt, metadata in zip(training.captions(), training.metadata(), strict=True):
        asked = read_composition(metadata)
        assert asked is not None
        assert all(each in prompt for each in asked.classes)
        colours = (each.colour for each in asked.include)
        assert all(colour in prompt for colour in colours if colour is not None)
    tags = [each["tag"] for each in held_out.metadata()]
    assert tags == ["colors", "color_attr", "counting", "position"] * 4


def test_init_writes_natural_prompts_for_the_published_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my run"
    main(["init", str(folder), "--config-name", "glm_image_80gb"])
    assert capsys.readouterr().out.endswith(f"\nnext: glm-grpo check --config-dir '{folder}'\n")
    config = compose_config(folder, None, ["run_dir=r"])
    paths = [str(folder / file) for file in ("prompts.jsonl", "held_out.jsonl")]
    data = [f"data.path={paths[0]}", f"data.eval_path={paths[1]}"]
    # No prompt has a target, so the reward is the one for texts.
    keys = ["run_dir=r", "reward=text", *data]
    assert config == compose_config(None, "glm_image_80gb", keys)
    training, held_out = (
        [prompts[row] for row in range(len(prompts))]
        for prompts in (
            load_prompts(path, height=1024, width=1024, reserved=ReservedTokens(), sources=0)
            for path in paths
        )
    )
    assert (len(training), len(held_out)) == (64, 16)
    assert not {each.texts for each in training} & {each.texts for each in held_out}
    for each in (*training, *held_out):
        assert [*each.texts] == [*find_glyph_texts(each.prompt)]
        assert len(each.texts) == 1


@pytest.mark.parametrize(
    ("name", "reward", "field", "term"),
    [
        ("janus_pro_1b_16gb", "composition_preference", "include", "composition"),
        # Prompts go with the reward, rather than with the model.
        ("glm_image_24gb", "composition", "include", "composition"),
        ("janus_pro_1b_16gb", "text", '\\"', "ocr"),
    ],
)
def test_init_writes_the_preset_that_was_chosen(
    name: str, reward: str, field: str, term: str, tmp_path: Path
) -> None:
    folder = tmp_path / "my-run"
    main(["init", str(folder), "--config-name", name, f"reward={reward}"])
    packaged = [f"reward={reward}", "data.path=a", "data.eval_path=b"]
    wanted = compose_config(None, name, packaged).reward
    assert compose_config(folder, None).reward == wanted
    written = (folder / "config.yaml").read_text()
    assert f"  - override reward: {reward}\n" in written
    for key, weight in wanted.weights().items():
        assert f"#     {key}: {{weight: {weight:g}}}\n" in written
    assert f"rescore RUN {term}=0.5`" in (folder / "README.md").read_text()
    rows = (folder / "prompts.jsonl").read_text().splitlines()
    assert all(field in row for row in rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("reward=text train.steps=3", "train.steps=3: init takes one override, reward=PRESET; set"),
        ("reward=text reward=edit", "reward=text reward=edit: init takes one override"),
        ("reward={terms:x}", "init takes one override"),
        ("reward=blanced", "did you mean balanced"),
    ],
)
def test_init_takes_no_other_override(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["init", str(tmp_path / "new"), *words.split()])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_preset_of_rewards_wins_over_what_init_wrote(tmp_path: Path) -> None:
    list(init_folder(tmp_path / "my-run", "glm_image_24gb"))
    chosen = compose_config(tmp_path / "my-run", None, ["reward=balanced"])
    packaged = ["reward=balanced", "data.path=a", "data.eval_path=b"]
    assert chosen.reward == compose_config(None, "glm_image_24gb", packaged).reward


def test_the_reward_that_init_wrote_as_a_comment_can_be_used(tmp_path: Path) -> None:
    list(init_folder(tmp_path / "my-run", "glm_image_24gb"))
    config = tmp_path / "my-run" / "config.yaml"
    lines = config.read_text().splitlines()
    first = lines.index("# reward:")
    last = next(row for row in range(first, len(lines)) if not lines[row])
    lines[first:last] = [line.removeprefix("# ") for line in lines[first:last]]
    config.write_text("\n".join(lines).replace("{weight: 0.7}", "{weight: 0.25}"))
    own = compose_config(tmp_path / "my-run", None)
    assert own.reward.weights()["ocr"] == 0.25


def test_init_says_how_to_go_on_in_ten_lines(tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    written = list(init_folder(folder, "tiny"))
    assert {path.name for path in written} == {path.name for path in folder.glob("*.*")}
    readme = (folder / "README.md").read_text()
    assert len(readme.splitlines()) == 10
    # As a shell takes it.
    assert f"`glm-grpo train --config-dir '{folder}'`" in readme
    # The embedded model's prompts; another model's are free.
    assert f"`{world.CAPTION_FORM}`" in readme
    config = (folder / "config.yaml").read_text()
    assert f"#   {world.CAPTION_FORM}\n# COLOURS: white on red, " in config
    other = tmp_path / "other"
    list(init_folder(other, "glm_image_24gb"))
    assert not any("embedded model" in path.read_text() for path in other.glob("*.*"))


def test_init_touches_nothing_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(ConfigError, match=f"{tmp_path} "):
        list(init_folder(tmp_path, "tiny"))
    with pytest.raises(ConfigError, match=r"did you mean tiny_edit\?"):
        list(init_folder(tmp_path / "new", "tiny_edti"))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("gigabytes", "said"),
    [
        (8, "need 16 GB or more"),
        (17, "--config-name glm_image_16gb or janus_pro_1b_16gb"),
        (25, "--config-name glm_image_24gb or janus_pro_1b_24gb or janus_pro_7b_24gb"),
        (85, "--config-name glm_image_80gb or janus_pro_7b_80gb"),
    ],
)
def test_init_proposes_the_configs_for_the_card(
    gigabytes: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA X")
    card = SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: card)
    proposed = propose_configs()
    assert f"NVIDIA X with {gigabytes} GB" in proposed
    assert proposed.endswith(said)


def test_init_says_that_there_is_no_card(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    main(["init", str(tmp_path / "new")])
    assert re.search("no GPU: .*`tiny`", capsys.readouterr().out)
