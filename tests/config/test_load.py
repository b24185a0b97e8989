from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from glm_grpo.config import (
    compose_config,
    config_differences,
    from_yaml,
    parse_override,
    shell_override,
    to_yaml,
    validate_config,
)
from glm_grpo.errors import ConfigError
from tests.programs import Programs

Bend = Callable[[str, object], dict[str, Any]]

PROMPTS = ["data.path=prompts.txt", "data.eval_path=held_out.txt"]
CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_every_primary_config_composes(configs_dir: Path, name: str) -> None:
    assert compose_config(configs_dir, name, PROMPTS).data.path == "prompts.txt"


@pytest.mark.parametrize(
    "choice",
    # What primary configs build on is no choice, and what accelerate reads is no config.
    sorted(
        f"{path.parent.name}={path.stem}"
        for path in CONFIGS.glob("*/*.yaml")
        if path.parent.name not in ("base", "accelerate") and path.stem != "shared"
    ),
)
def test_every_choice_of_a_group_composes(configs_dir: Path, choice: str) -> None:
    needed = {
        "loss=custom": ["loss.function=mine:loss"],
        "loss=gmpo": ["advantage.credit=image"],
    }
    overrides = [choice, *needed.get(choice, ()), *PROMPTS]
    assert compose_config(configs_dir, "tiny", overrides).train.steps > 0


def test_the_default_reward_weighs_the_four_terms(configs_dir: Path) -> None:
    stated = {"lpips": 0.4, "ssim": 0.2, "ocr": 0.3, "aesthetic": 0.1}
    for name in ("tiny", "glm_image_80gb"):
        terms = compose_config(configs_dir, name, PROMPTS).reward.model_dump()["terms"]
        assert {term: options["weight"] for term, options in terms.items()} == stated


def test_compose_config_reads_overrides_as_the_command_line_does(configs_dir: Path) -> None:
    config = compose_config(configs_dir, "tiny", ["optim.learning_rate=2e-5", "~advantage.clip"])
    assert config.optim.learning_rate == 2e-5
    assert config.advantage.clip is None


# Values that are refused once composed are in test_validation.py.
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.learning_rat=1", "did you mean optim.learning_rate"),
        ("lr=1e-4", r"did you mean optim\.learning_rate\?"),
        ("train.lr=1e-4", r"did you mean optim\.learning_rate\?"),
        ("grup_size=4", r"did you mean rollout\.group_size\?"),
        ("eval_path=a.txt", r"did you mean data\.eval_path\?"),
        ("resume=auto", r"did you mean train\.resume\?"),
        ("steps=5", r"did you mean train\.steps or decode\.steps\?"),
        ("orc=0.9", r"orc = '0.9'\n.*nor a reward term(.|\n)*did you mean ocr=0.9\?"),
        ("reward.terms.clip_score=0.2", r"write \+reward\.terms\.clip_score\.weight=0\.2$"),
        ("ocr =0.5", "Leave no space around =, as in ocr=0.5, and quote a word that contains"),
        ("prompts.txt", "Leave no space around ="),
        ("reward.terms.ocr.wieght=1", r"did you mean reward\.terms\.ocr\.weight\?"),
        ("reward=blanced", r"reward=blanced: Did you mean balanced\? There are aesthetic, bal"),
        ("reward=null", "reward=null: name one of its files, such as reward=aesthetic"),
        ("trackers=wandb", r"must be a list(.|\n)*write a list: 'trackers=\[wandb\]'"),
        ("train=[1]", r"train=\[1\](.|\n)*Cannot merge DictConfig with ListConfig"),
        ("train.steps=[", r"'train.steps=\[' lacks a closing bracket; the shell may have cut it"),
        (
            "data.path=~/a.txt",
            r"Hydra reads ~ only inside .* for the shell: 'data.path=\"~/a.txt\"'",
        ),
        (
            "reward=[ocr]",
            r"Could not load 'reward/ocr'. There are aesthetic, balanced, .*/reward\)",
        ),
        ("train.steps=1,2", "Ambiguous value"),
        ("train.steps=${nowhere}", "nowhere"),
        ("data=prompts", r"data.eval_path \(not given\)(.|\n)*data.path \(not given\)"),
    ],
    ids=ascii,
)
def test_compose_config_refuses_an_override_that_leads_nowhere(
    configs_dir: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        compose_config(configs_dir, "tiny", [override])


ORDINARY = (
    *("ä.txt", "数据.txt", "a #1.txt", "~/x.txt", "a(1).txt", "a[1.txt", "a{.txt", "a&b.txt"),
    *("a=b.txt", "a, b.txt", "it's.txt", 'a "b" c.txt', "back\\slash ä\\", "$HOME !x.txt"),
)


@pytest.mark.parametrize("name", ORDINARY)
def test_a_text_that_hydra_cannot_read_is_given_back_as_one_that_a_shell_takes(
    configs_dir: Path, name: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(configs_dir, "tiny", [f"data.path={name}"])
    written = re.search(r"(?:shell|the value): (.*)", str(caught.value))
    assert written is not None
    pasted = subprocess.run(["bash", "-c", f"printf %s {written[1]}"], stdout=-1, text=True).stdout
    assert compose_config(configs_dir, "tiny", [pasted]).data.path == os.path.expanduser(name)


@pytest.mark.parametrize("name", [*ORDINARY, "plain.txt", "a b.txt", "2024", "null", " x"])
def test_an_override_that_is_printed_can_be_pasted(name: str) -> None:
    (pasted,) = shlex.split(shell_override("run.name", name))
    assert parse_override(pasted) == ("run.name", name)


@pytest.mark.parametrize(
    "override",
    [
        "reward.terms.near.weight=0.1",
        "reward.terms.psnr={weight: 0.1}",
        "reward.terms.ssim.std_floor=0.5",
    ],
)
def test_compose_config_says_how_a_key_is_added_that_no_file_sets(
    configs_dir: Path, override: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(configs_dir, "tiny", [override])
    key, _, value = override.partition("=")
    assert str(caught.value).splitlines() == [
        "The config has 1 problem:",
        f"  {key} = {value!r}",
        "    rule:   is not in this config; put + in front to add a term, or an option that is "
        "left out",
        f"    remedy: write {shlex.quote(f'+{override}')}",
    ]


@pytest.mark.parametrize("plus", ["", "+"])
def test_null_for_a_term_that_is_not_there_is_refused(configs_dir: Path, plus: str) -> None:
    # lipps: the config keeps its lpips; psnr: spelled right, but not in use.
    for name, remedy in (("lipps", "did you mean reward.terms.lpips=null"), ("psnr", "leave it")):
        with pytest.raises(ConfigError, match=rf"terms\.{name} = None[\s\S]*{remedy}"):
            compose_config(configs_dir, "tiny", [f"{plus}reward.terms.{name}=null"])


def test_compose_config_adds_terms_and_options_by_a_plus(configs_dir: Path) -> None:
    added = [
        "+reward.terms.near={kind: lpips, weight: 0.1, network: squeeze, pretrained: false}",
        "+reward.terms.psnr.weight=0",
        "+reward.terms.ssim.std_floor=0.5",
    ]
    terms = compose_config(configs_dir, "tiny", added).reward.terms
    assert list(terms) == ["lpips", "near", "ssim", "ocr", "aesthetic", "psnr"]
    assert (terms["near"].weight, terms["psnr"].weight) == (0.1, 0.0)
    assert terms["near"].model_dump()["network"] == "squeeze"
    assert terms["ssim"].std_floor == 0.5


@pytest.mark.parametrize(
    ("name", "engine"), [("tiny", "easyocr"), ("glm_image_80gb", "rapidocr"), ("tiny", "rapidocr")]
)
def test_an_ocr_engine_is_switched_by_one_key(configs_dir: Path, name: str, engine: str) -> None:
    """Files may give options of both engines."""
    overrides = [*PROMPTS, f"reward.terms.ocr.engine={engine}"]
    ocr = compose_config(configs_dir, name, overrides).reward.model_dump()["terms"]["ocr"]
    assert ocr["engine"] == engine
    assert ("languages" in ocr, "threads" in ocr) == (engine == "easyocr", engine == "rapidocr")


def test_an_option_of_the_other_ocr_engine_is_refused_where_it_was_typed(
    configs_dir: Path,
) -> None:
    switched = ["reward.terms.ocr.engine=easyocr", "reward.terms.ocr.threads=4"]
    with pytest.raises(ConfigError, match=r"ocr\.threads = 4\s+rule: .*engine easyocr") as caught:
        compose_config(configs_dir, "tiny", switched)
    assert "detection_side" not in str(caught.value)


def test_a_remedy_is_accepted_on_the_same_command_line(configs_dir: Path) -> None:
    refused = "+reward.terms.foo={weight: 0.1, function: 'a:b'}"
    with pytest.raises(ConfigError) as caught:
        compose_config(configs_dir, "tiny", [refused])
    _, _, remedy = str(caught.value).rpartition("remedy: give it a kind: ")
    terms = compose_config(configs_dir, "tiny", [refused, remedy.split(", ")[0]]).reward.terms
    assert "foo" in terms


def test_a_remedy_with_braces_is_one_word_of_a_shell(configs_dir: Path) -> None:
    refused = "model.quantization=nf4"
    with pytest.raises(ConfigError) as caught:
        compose_config(configs_dir, "tiny", [refused])
    remedy = re.search(r"set (\S*model\.adapter=.*\}\S?)[ ,]", str(caught.value))
    assert remedy is not None
    (typed,) = shlex.split(remedy[1])
    adapter = compose_config(configs_dir, "tiny", [refused, typed]).model.adapter
    assert adapter is not None
    assert (adapter.rank, adapter.alpha) == (32, 64.0)


def test_compose_config_suggests_a_name_for_an_unknown_one(configs_dir: Path) -> None:
    listed = (
        "glm_image_16gb, glm_image_24gb, glm_image_80gb, glm_image_edit_24gb, "
        "glm_image_edit_80gb, glm_image_full, tiny, tiny_edit"
    )
    wanted = rf"config 'tyni'. Did you mean tiny\? There are {listed} \(of .*configs\)"
    with pytest.raises(ConfigError, match=wanted):
        compose_config(configs_dir, "tyni")
    with pytest.raises(ConfigError, match=rf"primary config 'photographs'. There are {listed}"):
        compose_config(configs_dir, "photographs")


def test_compose_config_suggests_a_folder_for_an_unknown_one(
    configs_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"no config folder .*cofigs. Did you mean .*configs\?"):
        compose_config(configs_dir.parent / "cofigs", "tiny")
    with pytest.raises(
        ConfigError, match=r"Give your own folder, such as one made by `glm-grpo init "
    ):
        compose_config(tmp_path / "configs", "tiny")


def test_compose_config_suggests_the_option_for_a_folder(
    configs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my run").mkdir()
    monkeypatch.chdir(tmp_path)
    said = "'my run' is a folder: did you mean --config-dir 'my run'?"
    with pytest.raises(ConfigError, match=re.escape(said)):
        compose_config(configs_dir, "tiny", ["my run"])
    with pytest.raises(ConfigError, match="'runs' is not of the form key=value"):
        compose_config(configs_dir, "tiny", ["runs"])


def test_compose_config_refuses_a_file_that_is_no_yaml(tmp_path: Path) -> None:
    (tmp_path / "torn.yaml").write_text("model: {path: tiny\n")
    with pytest.raises(ConfigError, match="cannot be composed(.|\n)*line 1"):
        compose_config(tmp_path, "torn")


def test_yaml_restores_the_config(configs_dir: Path) -> None:
    config = compose_config(configs_dir, "glm_image_16gb", [*PROMPTS, "optim.epsilon=1e-15"])
    restored = from_yaml(to_yaml(config))
    assert restored == config
    assert restored.optim.epsilon == 1e-15


@pytest.mark.parametrize(
    ("text", "message"),
    [("- 1\n- 2\n", "mapping of sections"), ("model: {path: tiny\n", "cannot be read")],
)
def test_from_yaml_refuses_what_is_no_config(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_yaml(text)


def test_a_stored_config_does_not_read_the_environment(
    configs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A run folder may be someone else's, and what is read from it goes into pages.
    monkeypatch.setenv("JUDGE_KEY", "secret")
    stored = to_yaml(compose_config(configs_dir, "tiny", ["run_dir=mine"]))
    read = from_yaml(stored.replace("run_dir: mine", "run_dir: ${oc.env:JUDGE_KEY}"))
    assert read.run_dir == "${oc.env:JUDGE_KEY}"


# Which keys may differ is in test_every_key.py.
def test_config_differences_lets_a_constant_schedule_run_longer(bend: Bend) -> None:
    stored = validate_config(bend("optim.schedule", "constant"))
    assert config_differences(stored, validate_config(bend("train.steps", 500))) == []
    # A weight that ends at the last step has another one at every step before.
    longer = validate_config(bend("anchor.final_weight", 0.1))
    ends = validate_config(bend("train.steps", 40))
    assert config_differences(ends, longer) == ["train.steps"]


def test_config_differences_sees_the_estimator_of_a_kl_that_is_weighed(bend: Bend) -> None:
    stored = validate_config(bend("loss.kl_estimator", "k3"))
    given = validate_config(bend("loss.kl_estimator", "k3_corrected"))
    assert config_differences(stored, given) == ["loss.kl_estimator"]
    bend("loss.kl_coef", 0.0)
    given = validate_config(bend("loss.kl_estimator", "k2"))
    stored = validate_config(bend("loss.kl_estimator", "k3"))
    assert config_differences(stored, given) == []


@pytest.mark.parametrize(
    ("overrides", "folder"),
    [
        (["run_dir=mine"], "mine"),
        (["hydra.run.dir=mine"], "{here}/mine"),
        (["hydra.run.dir=${now:%Y}/mine", "run_dir=${now:%Y}/../${now:%Y}/mine"], "20../.*mine"),
        (["hydra.run.dir=."], "outputs/.*"),
    ],
)
def test_a_run_folder_is_named_by_either_key(
    configs_dir: Path, overrides: list[str], folder: str
) -> None:
    run_dir = compose_config(configs_dir, "tiny", overrides).run_dir
    assert re.fullmatch(folder.format(here=re.escape(str(Path.cwd()))), run_dir)
    # What composing needed of Hydra is not left behind.
    assert not HydraConfig.initialized()


def test_a_run_folder_that_is_named_twice_is_refused(configs_dir: Path) -> None:
    wanted = "run_dir = 'mine' and hydra.run.dir = 'yours' name two .*leave one of them out"
    with pytest.raises(ConfigError, match=wanted):
        compose_config(configs_dir, "tiny", ["run_dir=mine", "hydra.run.dir=yours"])


def test_a_config_without_the_group_of_run_folders_names_its_own(
    configs_dir: Path, tmp_path: Path
) -> None:
    # Hydra has a folder of its own for it, which nobody asked for.
    content = OmegaConf.create(compose_config(configs_dir, "tiny").model_dump(mode="json"))
    OmegaConf.save(content, tmp_path / "own.yaml")
    assert compose_config(tmp_path, "own", ["run_dir=mine"]).run_dir == "mine"


SWEEP = """
import sys
import hydra
from glm_grpo.config import resolve_config

@hydra.main(version_base=None, config_path=sys.argv.pop(1), config_name="tiny")
def show(composed):
    print("run_dir", resolve_config(composed).run_dir)

show()
"""


@pytest.mark.parametrize(
    ("argument", "run_dir", "made"),
    [("run_dir=mine", "mine", []), ("hydra.run.dir=mine", "{here}/mine", ["mine"])],
)
def test_hydra_makes_no_folder_but_the_one_it_is_told(
    programs: Programs,
    configs_dir: Path,
    tmp_path: Path,
    argument: str,
    run_dir: str,
    made: list[str],
) -> None:
    ended = programs.run(tmp_path, "-c", SWEEP, str(configs_dir), argument)
    assert ended.stdout.split() == ["run_dir", run_dir.format(here=tmp_path)]
    assert [path.name for path in tmp_path.iterdir()] == made
    assert all(not any(path.iterdir()) for path in tmp_path.iterdir())


def test_a_sweep_into_one_folder_is_refused(
    programs: Programs, configs_dir: Path, tmp_path: Path
) -> None:
    words = ("-m", "train.seed=0,1", "hydra.run.dir=mine")
    ended = programs.run(tmp_path, "-c", SWEEP, str(configs_dir), *words)
    assert "hydra.run.dir = 'mine' names one folder for all runs of a sweep" in ended.stderr
    assert "run_dir" not in ended.stdout


def test_each_run_of_a_sweep_has_its_own_folder(
    programs: Programs, configs_dir: Path, tmp_path: Path
) -> None:
    ended = programs.run(tmp_path, "-c", SWEEP, str(configs_dir), "-m", "train.seed=0,1")
    (multirun,) = tmp_path.glob("multirun/*/*")
    shown = [line.split()[1] for line in ended.stdout.splitlines() if line.startswith("run_dir")]
    assert shown == [str(multirun / "0"), str(multirun / "1")]


def test_a_single_run_has_a_dated_folder(configs_dir: Path) -> None:
    run_dir = compose_config(configs_dir, "tiny").run_dir
    assert re.fullmatch(r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d", run_dir)
