"""Runs of which only config.yaml and the tables of the evaluations exist."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import OmegaConf
from PIL import Image

from glm_grpo.cli import main
from glm_grpo.commands.sweep import CompareRuns
from glm_grpo.config import Config, compose_config, to_yaml
from glm_grpo.errors import CheckpointError, ConfigError, StorageError
from glm_grpo.run.folder import RunFolder, write_atomically
from glm_grpo.run.provenance import Provenance, write_provenance
from glm_grpo.run.tables import Weighing, weighing_metadata
from glm_grpo.studio.compare.comparison import compare
from glm_grpo.studio.compare.tables import comparison_tables

TERMS = ("lpips", "ssim", "ocr", "aesthetic")
WEIGHTS = {"lpips": 0.5, "ocr": 0.5}

Group = Mapping[str, list[float | None]]
MakeRun = Callable[..., Path]


def store_evaluation(path: Path, step: int, groups: Mapping[str, Group], **columns: Any) -> None:
    """`groups`: prompt id -> term -> one score a sample; terms left out score 0.5."""
    samples = len(next(iter(next(iter(groups.values())).values())))
    rows = [
        {
            "step": step,
            "prompt_id": prompt_id,
            "prompt": f"a sign, {prompt_id}",
            "sample": sample,
            "texts": ["CAT"],
            **{f"raw/{name}": group.get(name, [0.5] * samples)[sample] for name in TERMS},
            "target": f"images/targets/{prompt_id}.png",
            "image": f"images/{prompt_id}-{sample}.png",
            **columns,
        }
        for prompt_id, group in groups.items()
        for sample in range(samples)
    ]
    table = pyarrow.Table.from_pylist(rows)
    types = {f"raw/{name}": pyarrow.float32() for name in TERMS}
    schema = [
        pyarrow.field(field.name, types.get(field.name, field.type)) for field in table.schema
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = weighing_metadata(Weighing({}, {}, "weighted_sum"))
    pyarrow.parquet.write_table(table.cast(pyarrow.schema(schema, metadata)), path)


@pytest.fixture(scope="module")
def compose(configs_dir: Path) -> Callable[..., Config]:
    known: dict[tuple[str, ...], Config] = {}

    def compose_once(*overrides: str) -> Config:
        if overrides not in known:
            samples = "eval.samples_per_prompt=2"
            known[overrides] = compose_config(configs_dir, "tiny", [samples, *overrides])
        return known[overrides]

    return compose_once


@pytest.fixture
def make_run(tmp_path: Path, compose: Callable[..., Config]) -> MakeRun:
    """Writes a run of evaluations by step, each as `store_evaluation` takes it."""

    def make(
        name: str, evaluations: Mapping[int, Mapping[str, Group]], *overrides: str, **columns: Any
    ) -> Path:
        folder = RunFolder(tmp_path / name)
        config = compose(*overrides)
        write_atomically(folder.config_path, to_yaml(config).encode())
        for step, groups in evaluations.items():
            store_evaluation(folder.evaluation_path(step), step, groups, **columns)
        return folder.path

    return make


def lpips_and_ocr(*scores: tuple[float, float]) -> dict[str, Group]:
    """One prompt a pair; both samples alike."""
    return {
        f"p{index}": {"lpips": [lpips] * 2, "ocr": [ocr] * 2}
        for index, (lpips, ocr) in enumerate(scores)
    }


BASE = lpips_and_ocr((0.25, 0.25), (0.5, 0.25))
FIRST = {0: BASE, 20: lpips_and_ocr((0.75, 0.25), (0.75, 0.5))}
SECOND = {
    0: BASE,
    10: lpips_and_ocr((0.25, 0.5), (0.25, 0.75)),
    20: lpips_and_ocr((0.25, 0.75), (0.25, 1.0)),
}


def test_compare_judges_every_evaluation_by_the_weights(make_run: MakeRun) -> None:
    runs = [make_run("a", FIRST), make_run("b", SECOND)]
    comparison = compare(runs, WEIGHTS)
    first, second = comparison.runs
    # 0.5 lpips + 0.5 ocr: (0.25 + 0.375) / 2 before; (0.5 + 0.625) / 2 and so on after.
    assert (first.steps, first.totals) == ((0, 20), (0.3125, 0.5625))
    assert (second.steps, second.totals) == ((0, 10, 20), (0.3125, 0.4375, 0.5625))
    assert first.terms == {"lpips": 0.75, "ocr": 0.375, "ssim": 0.5, "aesthetic": 0.5}
    assert second.terms == {"lpips": 0.25, "ocr": 0.875, "ssim": 0.5, "aesthetic": 0.5}
    assert comparison.base == {"lpips": 0.375, "ocr": 0.25, "ssim": 0.5, "aesthetic": 0.5}
    assert (comparison.prompts, comparison.samples_per_prompt) == (2, 2)
    assert comparison.left_out == ()
    assert "differ before" not in comparison_tables(comparison)[1].note


def test_compare_judges_by_the_images_that_the_terms_did_not_refuse(make_run: MakeRun) -> None:
    nan = math.nan
    later = {
        "p0": {"lpips": [0.5, 0.75], "ocr": [nan, 0.75]},
        "p1": {"lpips": [0.5, 0.5], "ocr": [nan, nan]},
    }
    runs = [make_run("a", FIRST), make_run("b", {0: BASE, 20: later})]
    second = compare(runs, WEIGHTS).runs[1]
    # Of one image of the first prompt alone, which had 0.25 before.
    assert second.totals == (0.3125, 0.75)
    assert second.gain.mean_difference == 0.5
    assert second.terms["ocr"] == 0.75


def test_only_a_run_that_started_from_no_weights_shows_the_base_model(
    make_run: MakeRun,
) -> None:
    later = {0: FIRST[20], 5: lpips_and_ocr((1.0, 1.0), (1.0, 1.0))}
    started = [make_run(name, later, "model.start_from=a") for name in ("b", "c")]
    comparison = compare([started[0], make_run("a", FIRST)], WEIGHTS)
    assert comparison.base["lpips"] == 0.375
    tables = comparison_tables(comparison)
    assert tables[2].rows[0][0] == "base"
    assert "differ before training already" in tables[1].note
    assert comparison_tables(compare(started, WEIGHTS))[2].rows[0][:2] == ("run 1, step 0", "0.750")


NORMALISED = (
    "reward.combine=normalize_then_sum",
    "reward.terms.lpips.weight=0.5",
    "reward.terms.ocr.weight=0.5",
    "reward.terms.ssim.weight=0",
    "reward.terms.aesthetic.weight=0",
)


def test_compare_judges_by_the_first_runs_reward_in_units_of_the_spread_of_the_base_model(
    make_run: MakeRun,
) -> None:
    before = {"p0": {"lpips": [0.0, 0.5], "ocr": [0.5, 0.5]}, "p1": {"lpips": [0.5, 1.0]}}
    after = {"p0": {"lpips": [0.5, 1.0], "ocr": [0.5, 0.5]}, "p1": {"lpips": [1.0, 1.0]}}
    floor = "+reward.terms.ocr.std_floor=0.25"
    runs = [make_run("a", {0: before, 20: before}, *NORMALISED, floor)]
    runs.append(make_run("b", {0: before, 20: after}, "train.steps=21"))
    comparison = compare(runs, None)
    assert comparison.combine == "normalize_then_sum"
    # lpips 0, 0.5, 0.5, 1 has mean 0.5 and sample std sqrt(0.5 / 3); ocr does not spread.
    std = math.sqrt(0.5 / 3)
    assert comparison.runs[0].totals == pytest.approx((0.0, 0.0), abs=1e-6)
    expected = 0.5 * (0 + 0.5 + 0.5 + 0.5) / 4 / std
    assert comparison.runs[1].totals == pytest.approx((0.0, expected), abs=1e-6)
    # Weights that are given judge raw scores, as ever: 0.5 * 0.875 + 0.5 * 0.5.
    raw = compare(runs, WEIGHTS)
    assert raw.combine == "weighted_sum"
    assert raw.runs[1].totals == (0.5, 0.6875)


def test_compare_pairs_gains_by_prompt(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm_grpo.run.summaries.FEWEST_PROMPTS", 2)
    runs = [make_run("a", FIRST), make_run("b", SECOND)]
    first, second = compare(runs, WEIGHTS).runs
    # By prompt, before 0.25 and 0.375, after 0.5 and 0.625: 0.25 more for either, no luck in it.
    assert (first.gain.mean_difference, first.gain.low, first.gain.high) == (0.25, 0.25, 0.25)
    assert first.over_first is None
    assert second.over_first is not None
    # 0.5 and 0.625 again.
    assert (second.over_first.mean_difference, second.over_first.low) == (0.0, 0.0)
    third = make_run("c", {0: BASE, 20: lpips_and_ocr((0.75, 0.75), (0.25, 0.5))})
    over_first = compare([*runs, third], WEIGHTS).runs[2].over_first
    assert over_first is not None
    # 0.75 - 0.5 and 0.375 - 0.625: means of two drawn from 0.25 and -0.25.
    assert (over_first.mean_difference, over_first.low, over_first.high) == (0.0, -0.25, 0.25)


def test_compare_takes_the_weights_of_the_first_run_where_no_weights_are_given(
    make_run: MakeRun,
) -> None:
    weights = ("reward.terms.lpips.weight=0.25", "reward.terms.ocr.weight=0.75")
    others = ("reward.terms.ssim.weight=0", "reward.terms.aesthetic.weight=0")
    runs = [make_run("a", FIRST, *weights, *others), make_run("b", SECOND)]
    comparison = compare(runs, None)
    assert comparison.weights == {"lpips": 0.25, "ocr": 0.75}
    # 0.25 * 0.25 + 0.75 * 0.875.
    assert comparison.runs[1].totals[-1] == 0.71875


def test_compare_lists_only_what_differs(make_run: MakeRun) -> None:
    # Where a run lies makes no difference to it, nor does its name.
    keys = ("reward.terms.ocr.weight=0.6", "train.steps=80", "advantage.clip=null")
    keys = (*keys, "run_dir=/elsewhere", "run.name=mine")
    runs = [make_run("a", FIRST), make_run("b", SECOND, *keys)]
    first, second = compare(runs, WEIGHTS).runs
    assert first.settings == {
        **{"reward.terms.ocr.weight": "0.3", "advantage.clip": "5.0", "train.steps": "40"}
    }
    assert second.settings == {
        **{"reward.terms.ocr.weight": "0.6", "advantage.clip": "null", "train.steps": "80"}
    }


ORIGIN = Provenance(
    began="2026-01-01T00:00:00+00:00",
    held_out={},
    training={},
    files={"model.path": "11", "reward.terms.aesthetic.head": "22"},
    # Stands for the function of a custom term.
    code={"reward.terms.lpips.network": "33"},
    versions={"torch": "2.10.0"},
)


def test_compare_lists_versions_of_packages(make_run: MakeRun) -> None:
    runs = [make_run("a", FIRST), make_run("b", SECOND)]
    write_provenance(RunFolder(runs[0]), ORIGIN)
    assert compare(runs, WEIGHTS).runs[0].settings == {}
    versions = {"torch": "2.11.0", "peft": "0.20"}
    write_provenance(RunFolder(runs[1]), dataclasses.replace(ORIGIN, versions=versions))
    comparison = compare(runs, WEIGHTS)
    assert comparison.runs[1].settings == {"versions.torch": "2.11.0", "versions.peft": "0.20"}
    for run, training in zip(runs, ({"0": "a"}, {"0": "b"}), strict=True):
        write_provenance(RunFolder(run), dataclasses.replace(ORIGIN, training=training))
    first, second = (run.settings for run in compare(runs, WEIGHTS).runs)
    assert first.keys() == second.keys() == {"training prompts"}


def test_compare_knows_models_by_their_files(make_run: MakeRun) -> None:
    runs = [make_run("a", FIRST), make_run("b", SECOND, "model.path=copy")]
    for run in runs:
        write_provenance(RunFolder(run), ORIGIN)
    compare(runs, WEIGHTS)
    others = {**ORIGIN.files, "model.path": "12"}
    write_provenance(RunFolder(runs[1]), dataclasses.replace(ORIGIN, files=others))
    with pytest.raises(ConfigError, match=r"model.path .*tiny \(11\) .*copy \(12\)"):
        compare(runs, WEIGHTS)


def test_compare_refuses_scores_of_other_code_or_files(make_run: MakeRun) -> None:
    runs = [make_run("a", FIRST), make_run("b", SECOND)]
    key = "reward.terms.aesthetic.head"
    other = dataclasses.replace(
        ORIGIN,
        code={"reward.terms.lpips.network": "34"},
        files={**ORIGIN.files, key: "23"},
        # Nor scores of what changed on the way.
        changed=(key,),
    )
    for run, provenance in zip(runs, (ORIGIN, other), strict=True):
        write_provenance(RunFolder(run), provenance)
    with pytest.raises(ConfigError, match=r"'alex \(33\)' .*'alex \(34\)'"):
        compare(runs, {"lpips": 1.0})
    for run, name in zip(runs, ("1", "2"), strict=True):
        scorers = {"reward.terms.ssim.url": f"served {name}"}
        write_provenance(RunFolder(run), dataclasses.replace(ORIGIN, scorers=scorers))
    with pytest.raises(ConfigError, match="'served 1' .*'served 2'"):
        compare(runs, {"ssim": 1.0})
    for run, provenance in zip(runs, (ORIGIN, other), strict=True):
        write_provenance(RunFolder(run), provenance)
    with pytest.raises(ConfigError, match=r"\(22\)' .*\(23, changed"):
        compare(runs, {"aesthetic": 1.0})


def test_compare_knows_a_file_of_a_term_by_its_content(make_run: MakeRun) -> None:
    key = "reward.terms.aesthetic.head"
    runs = [make_run("a", FIRST), make_run("b", SECOND, f"{key}=elsewhere/head.safetensors")]
    for run in runs:
        write_provenance(RunFolder(run), ORIGIN)
    assert compare(runs, WEIGHTS).left_out == ()


def test_compare_names_runs_by_the_shortest_end_of_their_paths(make_run: MakeRun) -> None:
    runs = [make_run("monday/0", FIRST), make_run("tuesday/0", SECOND), make_run("sweep/1", FIRST)]
    assert [run.name for run in compare(runs[1:], WEIGHTS).runs] == ["0", "1"]
    names = [run.name for run in compare(runs, WEIGHTS).runs]
    assert names == ["monday/0", "tuesday/0", "sweep/1"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("eval.seed=7", r"eval.seed .*1234 .* 7 .*glm-grpo eval /\S+/b eval.seed=1234"),
        ("rollout.width=256", "rollout.width .*128 in a, 256 in b"),
        ("model.path=copy", "model.path .*tiny in a, copy in b"),
        ("reward.terms.ocr=null", "'ocr': b .*lpips, ssim, aesthetic"),
        ("reward.terms.lpips.network=vgg", "'lpips' .*'alex' in a; .*'vgg' in b"),
    ],
)
def test_compare_refuses_runs_that_were_made_or_scored_in_another_way(
    override: str, message: str, make_run: MakeRun
) -> None:
    runs = [make_run("a", FIRST), make_run("b", SECOND, override)]
    with pytest.raises(ConfigError, match=message):
        compare(runs, WEIGHTS)


def test_compare_suggests_the_term_that_was_meant(make_run: MakeRun) -> None:
    runs = [make_run(name, FIRST) for name in ("a", "b")]
    with pytest.raises(ConfigError, match=r"'orc': a .*did you mean ocr\?"):
        compare(runs, {"orc": 0.5})


def test_compare_refuses_other_prompts_by_table(make_run: MakeRun) -> None:
    one = {0: lpips_and_ocr((0.5, 0.5)), 20: lpips_and_ocr((0.5, 0.5))}
    runs = [make_run("a", one), make_run("b", one)]
    store_evaluation(RunFolder(runs[1]).evaluation_path(20), 20, one[20], prompt="another")
    rule = r"step-000020.parquet .*glm-grpo eval \S+/b data.eval_path="
    with pytest.raises(ConfigError, match=rule):
        compare(runs, WEIGHTS)


def test_compare_refuses_other_target_images(make_run: MakeRun) -> None:
    runs = [make_run("a", FIRST), make_run("b", SECOND)]
    for brightness, run in enumerate(runs):
        place = run / "images" / "targets" / "p1.png"
        place.parent.mkdir(parents=True)
        Image.new("RGB", (4, 4), (brightness, 0, 0)).save(place)
    with pytest.raises(ConfigError, match="b/images/targets/p1.png"):
        compare(runs, WEIGHTS)


def test_compare_refuses_a_run_without_two_evaluations(make_run: MakeRun) -> None:
    runs = [make_run("a", FIRST), make_run("b", {0: BASE})]
    with pytest.raises(StorageError, match="b .*1 evaluation"):
        compare(runs, WEIGHTS)


def test_compare_leaves_out_terms_that_runs_scored_in_different_ways(make_run: MakeRun) -> None:
    # Weights, floors and threads leave the scores as they are.
    same = ("reward.terms.ssim.weight=0.1", "reward.terms.ocr.threads=1")
    same = (*same, "+reward.terms.ocr.std_floor=0.1", "reward.terms.lpips.network=vgg")
    comparison = compare([make_run("a", FIRST), make_run("b", SECOND, *same)], {"ocr": 1.0})
    assert comparison.left_out == ("lpips",)
    assert comparison.runs[0].terms.keys() == {"ocr", "ssim", "aesthetic"}


def test_compare_refuses_fewer_than_two_runs(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("a", FIRST)
    with pytest.raises(ConfigError, match="two"):
        compare([run, run / ".." / "a"], WEIGHTS)
    with pytest.raises(CheckpointError, match="nowhere "):
        compare([run, tmp_path / "nowhere"], WEIGHTS)


def test_compare_takes_a_sweep_by_its_folder(make_run: MakeRun, tmp_path: Path) -> None:
    for number in (10, 0, 9):
        make_run(f"sweep/{number}", FIRST)
    sweep = tmp_path / "sweep"
    (sweep / "multirun.yaml").touch()
    # A run that failed before it wrote its config.
    (sweep / "1").mkdir()
    assert [run.name for run in compare([sweep], WEIGHTS).runs] == ["0", "9", "10"]


def test_the_end_of_a_sweep_prints_what_the_command_prints(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "a sweep"
    make_run("a sweep/0", FIRST)
    make_run("a sweep/1", SECOND)
    (sweep / "multirun.yaml").touch()
    CompareRuns().on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(sweep)}}}))
    printed = capsys.readouterr().out

    main(["compare", str(sweep)])

    *same, again = printed.splitlines()
    assert same == capsys.readouterr().out.splitlines()
    assert again.endswith(f" glm-grpo compare '{sweep}'")


def test_a_sweep_that_cannot_be_compared_ends_all_the_same(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run("sweep/0", FIRST)
    (tmp_path / "sweep" / "multirun.yaml").touch()
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path / "sweep")}}})
    CompareRuns().on_multirun_end(config)
    assert "not compared" in capsys.readouterr().out
