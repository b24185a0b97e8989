"""What a command line and files of configs become, and what is refused of them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig

from glm_grpo.config import (
    compose_config,
    flatten,
    from_yaml,
    parse_override,
    shell_override,
    to_yaml,
    write_out_weights,
)
from glm_grpo.config.composition import PACKAGED_CONFIGS, choose_config
from glm_grpo.config.root import Config
from glm_grpo.errors import ConfigError
from rewards.problems import known_keys
from rewards.terms import KINDS
from tests.programs import Programs

PROMPTS = ["data.path=prompts.txt", "data.eval_path=held_out.txt"]
CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_every_primary_config_composes(name: str) -> None:
    assert compose_config(None, name, PROMPTS).data.path == "prompts.txt"


@pytest.mark.parametrize(
    "choice",
    # What primary configs build on is no choice, and what accelerate reads is no config.
    sorted(
        f"{path.parent.name}={path.stem}"
        for path in CONFIGS.glob("*/*.yaml")
        if path.parent.name not in ("base", "accelerate") and path.stem != "shared"
    ),
)
def test_every_choice_of_a_group_composes(choice: str) -> None:
    needed = {
        "loss=custom": ["loss.function=mine:loss"],
        "loss=gmpo": ["advantage.credit=image"],
    }
    overrides = [choice, *needed.get(choice, ()), *PROMPTS]
    assert compose_config(None, "tiny", overrides).train.steps > 0


def test_the_default_reward_weighs_the_four_terms() -> None:
    stated = {"lpips": 0.4, "ssim": 0.2, "ocr": 0.3, "aesthetic": 0.1}
    for name in ("tiny", "glm_image_80gb"):
        assert compose_config(None, name, PROMPTS).reward.weights() == stated


def test_keys_are_set_added_by_a_plus_and_removed_by_a_tilde() -> None:
    words = ["optim.learning_rate=2e-5", "+reward.terms.psnr.weight=0", "~advantage.clip"]
    config = compose_config(None, "tiny", words)
    assert config.optim.learning_rate == 2e-5
    assert config.reward.weights()["psnr"] == 0.0
    assert config.advantage.clip is None


def test_options_of_a_term_are_set_though_no_file_gives_them() -> None:
    mine = "+reward.terms.mine={kind: custom, weight: 1, function: 'a:b'}"
    words = ["reward.terms.ocr.extra_text_penalty=0.5", mine, "reward.terms.mine.std_floor=0.5"]
    terms = compose_config(None, "tiny", words).reward.model_dump()["terms"]
    assert terms["ocr"]["extra_text_penalty"] == 0.5
    assert terms["mine"]["std_floor"] == 0.5


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("optim.learning_rat=1", r"did you mean optim\.learning_rate\?"),
        ("~advantage.clp", r"did you mean advantage\.clip\?"),
        ("lr=1e-4", r"did you mean optim\.learning_rate\?"),
        ("grup_size=4", r"did you mean rollout\.group_size\?"),
        ("steps=5", r"did you mean train\.steps or decode\.steps\?"),
        ("orc=0.9", r"orc: did you mean ocr\?$"),
        ("kl_loss_coef=0.01", r"is loss\.kl_coef here; 0 skips the reference model$"),
        ("reward.terms.orc.weight=0.9", r"did you mean reward\.terms\.ocr\.weight\?"),
        ("reward.terms.ocr.wieght=1", r"did you mean reward\.terms\.ocr\.weight\?$"),
        ("lpip=1", r"lpip: did you mean lpips\?"),
        ("psnr=0.2", r"use \+reward\.terms\.psnr\.weight=0\.2$"),
        ("remote=0.2", r"composed: Could not .*\n.* use \+reward\.terms\.remote\.weight=0\.2$"),
        ("reward.terms.psnr.std_floor=1", r"reward\.terms\.psnr\.weight \(not given\)"),
        ("reward.terms.orc.std_floor=1", r"remedy: did you mean ocr\?"),
        ("reward.terms.psnr={weight: 0.1}", r"use \+reward\.terms\.psnr=\{weight: 0\.1\}$"),
        ("reward.terms={ocr: {wieght: 1}}", r"did you mean reward\.terms\.ocr\.weight\?"),
        ("train={stepps: 1}", r"train\.stepps: did you mean train\.steps\?"),
        ("reward=blanced", r": blanced: did you mean balanced\?"),
        ("reward=0.5", "reward is a group of files"),
        ("trackers.report_to=wandb", r"trackers is a list .* write trackers=\[wandb\]"),
        ("optim.betas.x=[0.9,0.95]", r"write optim\.betas=\[0\.9,0\.95\]"),
        ("trackers=wandb", r"for example trackers=\[wandb\]"),
        ("train.steps.x=1", r"train\.steps\.x: did you mean train\.steps\?"),
        ("run_dir.x=1", r"run_dir\.x: did you mean run_dir\?"),
        ("train.steps=1,2", "Ambiguous value"),
        ("train.steps=${nowhere}", "nowhere"),
        ("my-run", "missing EQUAL"),
        ("data=prompts", r"data\.path \(not given\)[\s\S]*data\.eval_path \(not given\)"),
    ],
)
def test_an_override_that_leads_nowhere_is_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose_config(None, "tiny", [word])


@pytest.mark.parametrize("word", ["run_dir=~/mine", 'run_dir="~/mine"'])
def test_a_tilde_of_an_override_is_the_home_folder(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compose_config(None, "tiny", [word]).run_dir == f"{tmp_path}/mine"
    assert parse_override("data.path=~/a.txt") == ("data.path", f"{tmp_path}/a.txt")


def test_a_term_to_add_is_named_beside_a_misspelt_key() -> None:
    meant = r"train\.stps: did you mean train\.steps\?\n.*\n.* use \+reward\.terms\.hps\.weight=1$"
    with pytest.raises(ConfigError, match=meant):
        compose_config(None, "tiny", ["hps=1", "train.stps=3"])


def test_an_unknown_config_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"tyni: did you mean tiny\?\n.* config 'tyni'\.$"):
        compose_config(None, "tyni")


def test_a_missing_folder_is_refused_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no folder .*`glm-grpo init .*/my-run`"):
        compose_config(tmp_path / "my-run", None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {path: tiny\n", r"torn\.yaml.*line 1"),
        ("train: {steps: 3}\n", "begin its file with `defaults"),
        (
            "defaults: [tiny, _self_]\ntrain: {steps: 3}\ntrain: {seed: 1}\n",
            r"composed: /.*/torn\.yaml, line 3: found duplicate key train; keep one$",
        ),
        ("defaults: [tny, _self_]\n", r"tny: did you mean tiny\?\n.* Could not load 'tny'\.$"),
        ("defaults: [_self_, tiny]\ntrain: {steps: 3}\n", "before `tiny`.*put `_self_` last"),
        *(
            (f"defaults: [tiny, _self_]\ntrain:\n  seed: {text}\n", message)
            for text, message in (
                ("010", r"torn\.yaml, line 3: train\.seed = 010: YAML would .* 8 .*decimal"),
                ("-07", "as -7"),
                ("1:30", "as 90"),
                ("1:30.5", "as 90.5"),
                ("0x10", "as 16"),
            )
        ),
        ("defaults: [tiny, _self_]\noptim: {betas: [0, 010]}\n", r"optim\.betas = 010"),
        ("defaults: [tiny, _self_]\ntrain.steps: 3\n", r"write train: \{steps: \.\.\.\}, or"),
        ("defaults: [tiny, _self_]\nreward: {terms.ocr: null}\n", r"line reward\.terms\.ocr=\."),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "torn.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        compose_config(tmp_path, "torn")


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_config_of_another_encoding_is_refused(tmp_path: Path, encoding: str) -> None:
    text = "defaults: [tiny, _self_]\nrun: {name: größer}\n"
    (tmp_path / "config.yaml").write_bytes(text.encode(encoding))
    with pytest.raises(ConfigError, match=r"config\.yaml is not UTF-8"):
        compose_config(tmp_path, None)
    # As Windows writes it.
    (tmp_path / "config.yaml").write_bytes(text.encode("utf-8-sig"))
    assert compose_config(tmp_path, None).run.name == "größer"


def test_files_on_which_a_config_builds_are_checked_too(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("defaults: [mine, _self_]\n")
    hydra = "hydra: {{sweeper: {{params: {{train.seed: 1}}}}}}\n"
    base = f"defaults: [tiny, _self_]\ntrain: {{{{seed: {{}}}}}}\n{hydra}"
    (tmp_path / "mine.yaml").write_text(base.format("010"))
    with pytest.raises(ConfigError, match=r"mine\.yaml, line 2: train\.seed = 010"):
        compose_config(tmp_path, None)
    (tmp_path / "mine.yaml").write_text(base.format("1_000"))
    assert compose_config(tmp_path, None).train.seed == 1000


def test_a_folder_of_ones_own_builds_on_the_package_and_wins_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compose_config(tmp_path, None).train.steps == 40
    own = tmp_path / "own"
    (own / "loss").mkdir(parents=True)
    (own / "config.yaml").write_text(
        "defaults: [tiny, _self_]\ndata: {path: '${config_dir:}/prompts.txt'}\ntrain: {steps: 3}\n"
    )
    (own / "loss" / "clipped.yaml").write_text("defaults: [gspo, _self_]\nclip_high: 0.5\n")
    monkeypatch.chdir(tmp_path)

    config = compose_config(Path("own"), None)

    assert (config.train.steps, config.data.path) == (3, f"{own}/prompts.txt")
    # Beside it, so that it goes for `clipped`; its own base is of the package.
    assert config.loss.clip_high == 0.5
    assert compose_config(Path("own"), "tiny").train.steps == 40


@pytest.mark.parametrize("place", ["my-run", "."])
@pytest.mark.parametrize(
    ("loss", "score"),
    [("mine.losses:loss", "my_rewards:score"), ("mine/losses.py:loss", "rewards.py:score")],
)
def test_the_folder_of_a_function_is_found_and_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, loss: str, score: str
) -> None:
    (tmp_path / "my-run").mkdir()
    (tmp_path / "my-run/config.yaml").write_text(
        "defaults: [tiny, {override loss: custom}, _self_]\n"
        f"loss: {{function: '{loss}'}}\n"
        f"reward: {{terms: {{mine: {{kind: custom, weight: 1.0, function: '{score}'}},\n"
        "                 composition: {weight: 1.0, detector: 'rewards.py:detect'}}}\n"
    )
    (tmp_path / place / "mine").mkdir()
    for name in ("my_rewards.py", "rewards.py", "mine/losses.py"):
        (tmp_path / place / name).touch()
    # Beside the config, rather than where the run is started.
    for name in ("my_rewards.py", "rewards.py"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    config = compose_config(Path("my-run"), None)
    monkeypatch.chdir("/")
    for each in (config, from_yaml(to_yaml(config))):
        values = flatten(each.model_dump())
        assert values["reward.terms.mine.folder"] == str((tmp_path / place).resolve())
        assert values["reward.terms.composition.folder"] == str((tmp_path / place).resolve())
        assert values["loss.folder"] == str((tmp_path / place).resolve())


def test_resuming_takes_the_runs_own_config_unless_another_is_named(tmp_path: Path) -> None:
    config = compose_config(None, "tiny", ["train.steps=3", f"run_dir={tmp_path}"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    of_run, of_package = (tmp_path, "config"), (PACKAGED_CONFIGS, "tiny")
    word = f"train.resume={tmp_path}"
    assert choose_config(None, None, [word]) == of_run
    assert choose_config(None, None, [f"{word}/checkpoints/step-000001"]) == of_run
    assert choose_config(None, "tiny", [word]) == of_package
    assert choose_config(None, None, [word, "loss=gspo"]) == of_package
    assert compose_config(None, None, [word, "train.seed=1"]).train.steps == 3
    # The command that began the run, without a term, may be repeated.
    (tmp_path / "config.yaml").write_text(to_yaml(compose_config(None, "tiny", ["lpips=null"])))
    assert "lpips" not in compose_config(None, None, [word, "lpips=null"]).reward.terms


@pytest.mark.parametrize(
    ("word", "whole"),
    [
        ("ocr=0.5", "reward.terms.ocr.weight=0.5"),
        ("mine=0.1,0.3", "reward.terms.mine.weight=0.1,0.3"),
        ("ocr=choice(0.1,0.5)", "reward.terms.ocr.weight=choice(0.1,0.5)"),
        ("ocr=null", "++reward.terms.ocr=null"),
        ("mine=null", "reward.terms.mine=null"),
        ("reward.terms.ocr.threads=1,4", "++reward.terms.ocr.threads=1,4"),
        ("reward.terms.ocr.weight=1", None),
        ("reward.terms.mine.kind=custom", None),
        # Keys, groups, and other forms.
        ("offload=none", None),
        ("loss=gspo", None),
        ("prices=low", None),
        ("+ocr=0.5", None),
        ("train.steps=3", None),
        ("ocr", None),
    ],
)
def test_a_terms_name_stands_for_its_weight(word: str, whole: str | None, tmp_path: Path) -> None:
    (tmp_path / "prices").mkdir()
    (tmp_path / "prices" / "low.yaml").touch()
    # A folder without configs is no group.
    (tmp_path / "ocr").mkdir()
    assert write_out_weights([word], tmp_path) == [whole or word]


def test_no_kind_of_term_is_called_like_a_key_or_a_group() -> None:
    groups = {path.name for path in PACKAGED_CONFIGS.iterdir() if path.is_dir()}
    assert not (groups | {key.partition(".")[0] for key in known_keys(Config)}) & {*KINDS}


@pytest.mark.parametrize("text", ["plain.txt", "a b.txt", "2024", "ä(1).txt", 'it\'s "b" \\c'])
def test_an_override_that_is_printed_can_be_pasted(text: str) -> None:
    (pasted,) = shlex.split(shell_override("run.name", text))
    assert parse_override(pasted) == ("run.name", text)


@pytest.mark.parametrize("engine", ["easyocr", "rapidocr"])
def test_an_ocr_engine_is_switched_by_one_key(engine: str) -> None:
    """Files may give options of both engines."""
    config = compose_config(None, "tiny", [f"reward.terms.ocr.engine={engine}"])
    ocr = config.reward.model_dump()["terms"]["ocr"]
    assert ("languages" in ocr, "threads" in ocr) == (engine == "easyocr", engine == "rapidocr")


def test_an_option_of_the_other_ocr_engine_is_refused_where_it_was_typed() -> None:
    switched = ["reward.terms.ocr.engine=easyocr", "reward.terms.ocr.threads=4"]
    with pytest.raises(ConfigError, match=r"ocr\.threads = 4\s+rule: .*engine easyocr") as caught:
        compose_config(None, "tiny", switched)
    assert "detection_side" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "folder"),
    [
        ([], r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d"),
        (["run_dir=mine"], "mine"),
        (["hydra.run.dir=mine"], "/.*/mine"),
    ],
)
def test_a_run_folder_is_named_by_either_key(overrides: list[str], folder: str) -> None:
    assert re.fullmatch(folder, compose_config(None, "tiny", overrides).run_dir)
    # What composing needed of Hydra is not left behind.
    assert not HydraConfig.initialized()


SHOW = """
import sys
import hydra
from glm_grpo.config import resolve_config

@hydra.main(version_base=None, config_path=sys.argv.pop(1), config_name="tiny")
def show(composed):
    print("run_dir", resolve_config(composed).run_dir)

show()
"""


@pytest.mark.parametrize(
    ("words", "run_dirs", "made"),
    [
        (["run_dir=mine"], ["mine"], []),
        (["hydra.run.dir=mine"], ["{here}/mine"], ["mine"]),
        (["-m", "train.seed=0,1", "hydra.sweep.dir=s"], ["{here}/s/0", "{here}/s/1"], ["s"]),
    ],
)
def test_hydra_makes_no_folder_but_the_one_it_is_told(
    programs: Programs, tmp_path: Path, words: list[str], run_dirs: list[str], made: list[str]
) -> None:
    ended = programs.run(tmp_path, "-c", SHOW, str(CONFIGS), *words)
    shown = [line.split()[1] for line in ended.stdout.splitlines() if line.startswith("run_dir")]
    assert shown == [each.format(here=tmp_path) for each in run_dirs]
    assert [path.name for path in tmp_path.iterdir()] == made
