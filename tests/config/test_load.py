from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from glm_grpo.config import (
    compose_config,
    config_differences,
    from_yaml,
    resolve_config,
    to_yaml,
    validate_config,
)
from glm_grpo.errors import ConfigError

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
    function = ["loss.function=mine:loss"] if choice == "loss=custom" else []
    overrides = [choice, *function, *PROMPTS]
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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.learning_rat=1"], "did you mean optim.learning_rate"),
        (["orc=0.9"], r"orc = '0.9'(.|\n)*did you mean ocr=0.9\?"),
        (["steps=3"], r"did you mean (train|decode)\.steps"),
        (["ocrr=0.5"], r"no reward term \(lpips, ssim, ocr, .*\n.* did you mean ocr=0.5\?"),
        (["optin=1"], r"is not a key of the config\n.* did you mean optim\?"),
        (["+foo=1"], "foo = 1"),
        (["model=tony"], "Available options in 'model'"),
        (["train.steps=["], r"'train.steps=\[' is not of the form key=value"),
        (["train.steps=${nowhere}"], "nowhere"),
        (["~decode"], r"decode \(not given\)"),
        (["reward.terms.ocr.wieght=1"], r"did you mean reward\.terms\.ocr\.weight\?"),
        (["+reward.terms.ocr.wieght=1"], "engine rapidocr\n.*did you mean weight"),
        (["+reward.terms.lpip.weight=1"], r"terms\.lpip = (.|\n)*did you mean lpips"),
        (["reward.term.ocr.weight=1"], r"mean reward\.terms\.ocr\.weight or [^?]*\?$"),
        (["data=prompts"], r"data.eval_path \(not given\)(.|\n)*data.path \(not given\)"),
    ],
)
def test_compose_config_refuses_overrides_that_lead_nowhere(
    configs_dir: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        compose_config(configs_dir, "tiny", overrides)
    assert "provider=" not in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "reward.terms.near.weight=0.1",
        "reward.terms.psnr.weight=0.1",
        "reward.terms.psnr={weight: 0.1}",
        "reward.terms.ocr.languages=[en]",
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
        "    rule:   is not in the config at hand; a + in front adds a term, or an option left out",
        f"    remedy: write +{override}",
    ]


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


REFUSED_WITH_A_REMEDY = [
    (["trackers=[nope]"], "write "),
    (["+reward.terms.foo={weight: 0.1, function: 'a:b'}"], "give it a kind: "),
]


@pytest.mark.parametrize(("overrides", "before"), REFUSED_WITH_A_REMEDY)
def test_a_remedy_is_accepted_on_the_same_command_line(
    configs_dir: Path, overrides: list[str], before: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(configs_dir, "tiny", overrides)
    _, _, remedy = str(caught.value).rpartition(f"remedy: {before}")
    typed = remedy.split(", ")[0]
    assert "=" in typed
    compose_config(configs_dir, "tiny", [*overrides, typed])


@pytest.mark.parametrize("refused", ["model.quantization=nf4"])
def test_a_remedy_with_braces_is_one_word_of_a_shell(configs_dir: Path, refused: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(configs_dir, "tiny", [refused])
    remedy = re.search(r"set (\S*model\.adapter=.*\}\S?)[ ,]", str(caught.value))
    assert remedy is not None
    (typed,) = shlex.split(remedy[1])
    adapter = compose_config(configs_dir, "tiny", [refused, typed]).model.adapter
    assert adapter is not None
    assert (adapter.rank, adapter.alpha) == (32, 64.0)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("tyni", "Did you mean tiny"), ("glm_image_80", "Did you mean glm_image_80gb")],
)
def test_compose_config_suggests_a_name_for_an_unknown_one(
    configs_dir: Path, name: str, meant: str
) -> None:
    listed = (
        "glm_image_16gb, glm_image_24gb, glm_image_80gb, glm_image_edit_24gb, "
        "glm_image_edit_80gb, glm_image_full, tiny, tiny_edit"
    )
    wanted = rf"Cannot find primary config '{name}'. {meant}\? There are {listed} \(of .*configs\)"
    with pytest.raises(ConfigError, match=wanted):
        compose_config(configs_dir, name)
    with pytest.raises(ConfigError, match=rf"primary config 'photographs'. There are {listed}"):
        compose_config(configs_dir, "photographs")


def test_compose_config_suggests_a_folder_for_an_unknown_one(
    configs_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"no folder of configs .*cofigs. Did you mean .*configs\?"
    ):
        compose_config(configs_dir.parent / "cofigs", "tiny")
    with pytest.raises(ConfigError, match=r"Give a folder of your own, such as `glm-grpo init "):
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


def test_from_yaml_reads_runs_of_before_there_were_names(configs_dir: Path) -> None:
    config = compose_config(configs_dir, "tiny")
    stored = yaml.safe_load(to_yaml(config))
    del stored["run"]
    assert from_yaml(yaml.safe_dump(stored)) == config


def test_from_yaml_refuses_what_is_no_mapping() -> None:
    with pytest.raises(ConfigError, match="mapping of sections"):
        from_yaml("- 1\n- 2\n")


def test_from_yaml_refuses_text_that_is_torn() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        from_yaml("model: {path: tiny\n")


def test_resolve_config_resolves_interpolations(values: dict[str, Any]) -> None:
    values["eval"]["seed"] = "${train.seed}"
    values["train"]["seed"] = 7
    assert resolve_config(OmegaConf.create(values)).eval.seed == 7


@pytest.mark.parametrize(
    ("key", "value", "differences"),
    [
        ("loss.clip_high", 0.28, ["loss.clip_high"]),
        ("model.adapter", {"rank": 4, "alpha": 8.0}, ["model.adapter"]),
        ("train.steps", 500, ["train.steps"]),
        ("run_dir", "elsewhere", []),
        ("trackers", [], []),
        ("train.resume", "auto", []),
        ("run.name", "another", []),
        ("run.tags", ["another"], []),
        ("train.micro_batch_size", 1, []),
        ("offload", "modules", []),
        ("reward.overlap", False, []),
        ("decode.batch_size", 1, []),
        ("reward.combine", "normalize_then_sum", ["reward.combine"]),
        ("reward.allow_untied", True, ["reward.allow_untied"]),
        ("reward.terms.ssim.std_floor", 0.5, ["reward.terms.ssim.std_floor"]),
    ],
)
def test_config_differences_names_what_must_not_change(
    values: dict[str, Any], bend: Bend, key: str, value: object, differences: list[str]
) -> None:
    stored = validate_config(values)
    given = validate_config(bend(key, value))
    found = config_differences(stored, given)
    assert [name for name in found if not name.startswith(f"{key}.")] == differences
    assert config_differences(stored, stored) == []


def test_config_differences_lets_a_constant_schedule_run_longer(bend: Bend) -> None:
    stored = validate_config(bend("optim.schedule", "constant"))
    assert config_differences(stored, validate_config(bend("train.steps", 500))) == []


def test_config_differences_sees_the_estimator_of_a_kl_that_is_weighed(bend: Bend) -> None:
    stored = validate_config(bend("loss.kl_estimator", "k3"))
    given = validate_config(bend("loss.kl_estimator", "k3_corrected"))
    assert config_differences(stored, given) == ["loss.kl_estimator"]
    bend("loss.kl_coef", 0.0)
    given = validate_config(bend("loss.kl_estimator", "k2"))
    stored = validate_config(bend("loss.kl_estimator", "k3"))
    assert config_differences(stored, given) == []


def test_config_differences_sees_a_reward_weight(bend: Bend, values: dict[str, Any]) -> None:
    stored = validate_config(values)
    given = validate_config(bend("reward.terms.ocr.weight", 0.5))
    assert config_differences(stored, given) == ["reward.terms.ocr.weight"]


def test_config_differences_sees_a_term_of_another_name(bend: Bend, values: dict[str, Any]) -> None:
    stored = validate_config(values)
    given = validate_config(bend("reward.terms.near", {"kind": "ssim", "weight": 0.5}))
    differences = config_differences(stored, given)
    assert "reward.terms.near.kind" in differences
    assert "reward.terms.near.weight" in differences
    assert all(key.startswith("reward.terms.near.") for key in differences)


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


def start_job(configs_dir: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SWEEP, str(configs_dir), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(configs_dir.parent)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize(
    ("argument", "run_dir", "made"),
    [
        ("run_dir=mine", "mine", []),
        ("hydra.run.dir=mine", "{here}/mine", ["mine"]),
    ],
)
def test_hydra_makes_no_folder_but_the_one_it_is_told(
    configs_dir: Path, tmp_path: Path, argument: str, run_dir: str, made: list[str]
) -> None:
    ended = start_job(configs_dir, tmp_path, argument)
    assert ended.stdout.split() == ["run_dir", run_dir.format(here=tmp_path)]
    assert [path.name for path in tmp_path.iterdir()] == made
    assert all(not any(path.iterdir()) for path in tmp_path.iterdir())


def test_a_sweep_into_one_folder_is_refused(configs_dir: Path, tmp_path: Path) -> None:
    ended = start_job(configs_dir, tmp_path, "-m", "train.seed=0,1", "hydra.run.dir=mine")
    assert "hydra.run.dir = 'mine' names one folder for the runs of a sweep" in ended.stderr
    assert "run_dir" not in ended.stdout


def test_each_run_of_a_sweep_has_its_own_folder(configs_dir: Path, tmp_path: Path) -> None:
    result = start_job(configs_dir, tmp_path, "-m", "train.seed=0,1")
    (multirun,) = tmp_path.glob("multirun/*/*")
    shown = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("run_dir")]
    assert shown == [str(multirun / "0"), str(multirun / "1")]


def test_a_single_run_has_a_dated_folder(configs_dir: Path) -> None:
    run_dir = compose_config(configs_dir, "tiny").run_dir
    assert re.fullmatch(r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d", run_dir)


def test_an_override_of_any_length_is_refused_in_a_page(configs_dir: Path) -> None:
    override = f"++decode.steps=[{'x' * 200_000},0,A\x8b]"
    with pytest.raises(ConfigError, match="cannot be composed") as caught:
        compose_config(configs_dir, "tiny", [override])
    assert len(str(caught.value)) < 5_000
    assert "characters)" in str(caught.value)
