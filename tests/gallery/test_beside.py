"""Other runs in a gallery: what is matched, weighted and kept, and what is refused."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from glm_grpo import cli
from glm_grpo.errors import CheckpointError, ConfigError, StorageError
from glm_grpo.gallery import update_gallery, write_beside, write_gallery
from glm_grpo.report.compare.beside import match_runs
from glm_grpo.run.recorder import Recorder
from rewards.reweigh import combine

MakeRun = Callable[..., Any]

# Of the other run, prompt `kite`: under the weights 0.4, 0.2, 0.3 and 0.1 of the run itself
# 0.2 + 0.1 + 0.3 = 0.6 and 0.1, under those of the other, 0.1 three times and 0.7, 0.2 and 0.7.
OTHER_RAW = [[0.5, 0.5, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
OWN_TOTALS, OTHER_TOTALS = [0.6, 0.1], [0.2, 0.7]


def set_config(run: Any, section: str, **values: Any) -> None:
    config = yaml.safe_load(run.folder.config_path.read_text())
    place = config
    for name in section.split("."):
        place = place[name]
    place.update(values)
    run.folder.config_path.write_text(yaml.safe_dump(config))


@pytest.fixture
def pair(make_run: MakeRun) -> tuple[Any, Any]:
    """A run with evaluations at steps 0 and 2; another, of other weights, at 0 and 3."""
    run, other = make_run("run"), make_run("other")
    for step in (0, 2):
        run.record_evaluation(step)
    other.raw[0] = torch.tensor(OTHER_RAW)
    weighted = replace(other.table(), weights=torch.tensor([0.1, 0.1, 0.1, 0.7]))
    other.table = lambda: weighted
    for step in (0, 3):
        other.record_evaluation(step)
    return run, other


def show(run: Any, *others: Any) -> None:
    write_beside(run.folder, match_runs(run.folder.path, [each.folder.path for each in others]))
    write_gallery(run.folder, ())


def test_gallery_shows_the_newest_evaluation_of_another_run_under_its_own_weights(
    pair: tuple[Any, Any],
) -> None:
    run, other = pair
    show(run, other)
    data = run.data("run")
    assert data["beside"] == [
        {
            "key": "beside-1",
            "name": "other",
            "step": 3,
            "alike": ["lpips", "ssim", "ocr", "aesthetic"],
            "is_weighed_alike": True,
        }
    ]
    assert data["problems"] == []
    kite, field = run.data("beside-1")["groups"]
    assert kite["total"] == pytest.approx(OWN_TOTALS)
    # Only aesthetic applies, which takes over all weights.
    assert field["total"] == pytest.approx([0.7, -2.5])
    assert kite["images"] == [f"beside/1/eval-000003/kite-{sample}.png" for sample in (0, 1)]
    # The target is the run's own.
    assert kite["target"] == run.data("evaluation-000002")["groups"][0]["target"]
    stored = (other.folder.images_dir / "eval-000003" / "kite-1.png").read_bytes()
    assert (run.gallery / "beside/1/eval-000003/kite-1.png").read_bytes() == stored
    assert (run.gallery / "beside/1/eval-000003/kite-1.webp").read_bytes().startswith(b"RIFF")


def test_totals_of_a_run_that_scored_in_another_way_are_its_own_and_said_not_to_compare(
    pair: tuple[Any, Any],
) -> None:
    run, other = pair
    set_config(other, "reward.terms.ocr", case_sensitive=True)
    show(run, other)
    (shown,) = run.data("run")["beside"]
    assert (shown["is_weighed_alike"], "ocr" in shown["alike"]) == (False, False)
    assert run.data("beside-1")["groups"][0]["total"] == pytest.approx(OTHER_TOTALS)


def test_a_copy_of_a_run_has_its_totals_in_units_of_the_untrained_spread(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_run("run")
    run.recorder = Recorder(run.folder, trackers=(), config={}, combine="normalize_then_sum")
    mode, untrained = "normalize_then_sum", run.table()
    run.record_evaluation(0, totals=combine(untrained, mode=mode, untrained=untrained))
    run.raw = run.raw * 2
    run.record_evaluation(2, totals=combine(run.table(), mode=mode, untrained=untrained))
    shutil.copytree(run.folder.path, tmp_path / "copy")
    (shown,) = match_runs(run.folder.path, [tmp_path / "copy"])
    write_gallery(run.folder, ())
    own = run.data("evaluation-000002")["groups"]
    assert [group["total"] for group in shown.groups] == [group["total"] for group in own]
    assert own[0]["total"] != run.data("evaluation-000000")["groups"][0]["total"]


@pytest.mark.parametrize("what", ["prompt", "target"])
def test_gallery_says_how_many_prompts_are_the_same(what: str, make_run: MakeRun) -> None:
    run, other = make_run("run"), make_run("other")
    kite, field = other.prompts
    others = {
        "prompt": replace(kite, prompt="a blue sign"),
        "target": replace(kite, target=kite.target + 1),
    }
    other.prompts = (others[what], field)
    run.record_evaluation(0)
    other.record_evaluation(0)
    show(run, other)
    assert [group["prompt_id"] for group in run.data("beside-1")["groups"]] == ["b"]
    (problem,) = run.data("run")["problems"]
    assert problem["where"] == "Beside: other"
    assert problem["message"].startswith("1 of 2 held-out prompts are the same there")


def test_runs_are_named_by_what_tells_them_apart(make_run: MakeRun) -> None:
    runs = [make_run(name) for name in ("own", "a/seed-0", "b/seed-0", "c")]
    for run in runs:
        run.record_evaluation(0)
    set_config(runs[3], "run", name="<b>longer</b>")
    show(*runs)
    names = [shown["name"] for shown in runs[0].data("run")["beside"]]
    # c has a name of its own; the others go by the ends of their paths.
    assert names == ["a/seed-0", "b/seed-0", "<b>longer</b>"]


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("eval", {"seed": 7}, "eval.seed is 1234 in run, 7 in other: only runs whose"),
        ("rollout", {"width": 256}, "rollout.width is 128 in run, 256 in other"),
    ],
)
def test_pictures_of_another_seed_or_size_are_refused(
    section: str, values: dict[str, int], message: str, pair: tuple[Any, Any]
) -> None:
    run, other = pair
    set_config(other, section, **values)
    with pytest.raises(ConfigError, match=message):
        match_runs(run.folder.path, [other.folder.path])


def test_runs_that_cannot_be_shown_are_refused(
    pair: tuple[Any, Any], make_run: MakeRun, tmp_path: Path
) -> None:
    own, other = (each.folder for each in pair)
    with pytest.raises(ConfigError, match=r"run is the run itself: .* leave it out"):
        match_runs(own.path, [other.path, own.path / "."])
    with pytest.raises(ConfigError, match=r"other is named twice: .* leave it out"):
        match_runs(own.path, [other.path, other.path])
    with pytest.raises(CheckpointError, match="nothing"):
        match_runs(own.path, [tmp_path / "nothing"])
    with pytest.raises(StorageError, match=r"begun has no evaluation .* leave it out"):
        match_runs(own.path, [make_run("begun").folder.path])
    strange = make_run("strange")
    strange.prompts = tuple(replace(each, prompt=f"no {each.prompt}") for each in strange.prompts)
    strange.record_evaluation(0)
    with pytest.raises(ConfigError, match=r"has none of the 2 held-out prompts of .* leave it out"):
        match_runs(own.path, [strange.folder.path])
    other.evaluation_path(3).write_bytes(b"PAR1")
    with pytest.raises(StorageError, match="step-000003.parquet"):
        match_runs(own.path, [other.path])


def test_command_keeps_other_runs_until_it_names_others_or_none(
    pair: tuple[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = pair
    command = ["gallery", str(run.folder.path)]
    path = tmp_path / "sent.zip"
    cli.main([*command, "--beside", str(other.folder.path), "--zip", str(path)])
    with zipfile.ZipFile(path) as archive:
        assert "run/gallery/beside/1/eval-000003/kite-0.png" in archive.namelist()
    shutil.rmtree(other.folder.path)
    run.record_evaluation(4)
    update_gallery(run.folder, 4)
    cli.main(command)
    assert [shown["name"] for shown in run.data("run")["beside"]] == ["other"]
    with pytest.raises(SystemExit):
        cli.main([*command, "--beside", str(other.folder.path)])
    assert str(other.folder.path) in capsys.readouterr().err
    assert (run.gallery / "beside/1/eval-000003/kite-0.png").is_file()

    cli.main([*command, "--beside"])

    assert run.data("run")["beside"] == []
    assert not [name for name in run.files(".") if "beside" in name and "assets" not in name]
