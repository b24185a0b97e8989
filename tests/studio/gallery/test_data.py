from __future__ import annotations

import math
import os
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml

from glm_grpo.run.tables import SummaryRow
from glm_grpo.run.writing import append_metrics
from glm_grpo.studio.gallery import write_gallery
from rewards.score_map import ScoreBox, ScoreBoxes
from rewards.types import Prompt

NAMES = ("lpips", "ssim", "ocr", "aesthetic")
HOSTILE = (
    "</script><script>alert(1)</script>\"'`\\ שלום \u202e🙂 \u2028\u2029 __proto__ " + "w" * 5000
)


def written(run: Any, key: str) -> Any:
    write_gallery(run.folder, ())
    return run.data(key)


def test_run_tells_the_settings(run: Any) -> None:
    data = written(run, "run")
    assert data["config"] == run.folder.config_path.read_text()
    weights = {term["name"]: term["weight"] for term in data["reward"]["terms"]}
    assert weights == dict(zip(NAMES, (0.4, 0.2, 0.3, 0.1), strict=True))
    assert data["advantage"]["credit"] == "place"
    assert (data["group_size"], data["image_size"]) == (8, {"width": 128, "height": 128})
    assert data["steps_planned"] == 40
    # Before the first step there is nothing to show, and nothing wrong.
    for name in ("evaluations", "chunks", "summary", "problems"):
        assert data[name] == [], name


def test_run_tells_when_it_recorded_and_the_pace_of_its_last_ten_steps(run: Any) -> None:
    for step, seconds in enumerate((1.0, 1.0, *[2.0] * 4, 3.0, *[4.0] * 5), start=1):
        append_metrics(run.folder, step, {"time/step": seconds})
    os.utime(run.folder.metrics_path, (1_700_000_000, 1_700_000_000))
    data = written(run, "run")
    # Of the last ten, 2 four times, 3, and 4 five times: between the fifth and the sixth.
    assert data["seconds_per_step"] == 3.5
    assert data["recorded"] == 1_700_000_000
    # 28 of 40 steps are left; this run knows no time of an evaluation.
    assert data["seconds_left"] == 98.0


def test_time_left_counts_the_evaluations_to_come(run: Any) -> None:
    every = yaml.safe_load(run.folder.config_path.read_text())["train"]["eval_every"]
    append_metrics(run.folder, 0, {"time/evaluation": 7.0})
    for step in range(1, every + 1):
        append_metrics(run.folder, step, {"time/step": 2.0})
    # The evaluation of the last step recorded is yet to be made.
    to_come = 40 // every
    left = 2.0 * (40 - every)
    assert written(run, "run")["seconds_left"] == left + 7.0 * to_come
    append_metrics(run.folder, every, {"time/evaluation": 9.0})
    assert written(run, "run")["seconds_left"] == left + 9.0 * (to_come - 1)


def test_run_lists_steps_by_tens_and_evaluations(run: Any) -> None:
    append_metrics(run.folder, 0, {"eval/total": 0.5})
    run.record_evaluation(0)
    for step in (1, 2, 10, 11, 21):
        run.record_step(step)
    # Its rollout was removed, say to save space.
    run.folder.rollout_path(2).unlink()
    run.record_evaluation(20)
    data = written(run, "run")
    assert data["chunks"] == [
        {"key": "steps-000001", "steps": [1, 2, 10]},
        {"key": "steps-000011", "steps": [11]},
        {"key": "steps-000021", "steps": [21]},
    ]
    assert data["evaluations"] == [
        {"step": 0, "key": "evaluation-000000"},
        {"step": 20, "key": "evaluation-000020"},
    ]
    entries = run.data("steps-000001")["steps"]
    assert [(entry["step"], "groups" in entry) for entry in entries] == [
        (1, True),
        (2, False),
        (10, True),
    ]
    assert entries[1]["problem"].startswith("Cannot read rollouts/step-000002.parquet: No such")


def test_run_tells_its_course_and_what_it_gained(run: Any) -> None:
    run.record_evaluation(0)
    run.record_evaluation(2)
    append_metrics(run.folder, 0, {"eval/total": 0.5})
    run.record_step(1)
    run.record_step(2, **{"reward/mean": math.nan, "canary/departures": 1.0})
    summary = SummaryRow("total", before=0.5, after=0.75, difference=0.25, low=0.125, high=0.5)
    write_gallery(run.folder, [summary])
    data = run.data("run")
    assert data["overview"] == {
        "steps": [0, 1, 2],
        "values": {
            "reward/mean": [None, 1 / 7, None],
            "eval/total": [0.5, None, None],
            "canary/departures": [None, None, 1.0],
        },
    }
    assert data["summary"] == [asdict(summary)]


def test_steps_hold_their_metrics_and_null_where_one_is_not_finite(run: Any) -> None:
    run.record_step(1, **{"loss/total": math.nan})
    run.record_step(11, **{"loss/total": 1e-300})
    data = written(run, "steps-000001")
    assert data["metrics"] == [{"step": 1, "reward/mean": 1 / 7, "loss/total": None}]
    assert run.data("steps-000011")["metrics"] == [
        {"step": 11, "reward/mean": 11 / 7, "loss/total": 1e-300}
    ]


def test_step_holds_every_field_of_its_groups(run: Any) -> None:
    run.record_step(3)
    first, second = written(run, "steps-000001")["steps"][0]["groups"]
    assert first == {
        "prompt_id": "kite",
        "prompt": 'a red sign that says "OPEN"',
        "texts": ["OPEN"],
        "target": "train-targets/kite.png",
        "decode_seed": "9223372036854775807",
        "images": ["step-000003/kite-0.png", "step-000003/kite-1.png"],
        # The shortest decimals: 1 / 3 is 0.33333334 in 32 bits.
        "raw": {
            "lpips": [0.1, 0.33333334],
            "ssim": [0.2, 0.25],
            "ocr": [0.3, 1.0],
            "aesthetic": [0.4, 1e-07],
        },
        "notes": {
            "ocr": [
                {
                    "read": "OPFN",
                    "marks": [["OP", True], ["F", False], ["N", True]],
                    "missing": "",
                },
                {"read": "", "marks": [], "missing": "OPEN"},
            ]
        },
        # 0.4 * 0.1 + 0.2 * 0.2 + 0.3 * 0.3 + 0.1 * 0.4, and so on.
        "total": [pytest.approx(0.21), pytest.approx(0.4 / 3 + 0.05 + 0.3)],
        "penalty": [0.0, 0.1],
        "advantage": [-0.7, 0.7],
        "is_zero_std": False,
    }
    assert second == {
        "prompt_id": "b",
        "prompt": "a field",
        "texts": [],
        "target": None,
        "decode_seed": "7",
        "images": ["step-000003/b-0.png", "step-000003/b-1.png"],
        "raw": {"lpips": None, "ssim": None, "ocr": None, "aesthetic": [0.7, -2.5]},
        "notes": {},
        # Alone, aesthetic takes over the weight of the others.
        "total": [pytest.approx(0.7), -2.5],
        "penalty": [0.0, pytest.approx(-3.2)],
        "advantage": [0.0, 0.0],
        "is_zero_std": True,
    }


def test_credit_by_place_is_in_a_file_of_its_step(run: Any) -> None:
    run.record_step(2)
    # Of one row of two places: three digits of the largest of each group, 0.0625 and 20. No scale
    # is below a quarter of the larger one.
    first, second = [[[0.0625, -0.012]], [[-0.00004, 0.025]]], [[[20.0, 0.0]], [[-3.0, 9.0]]]
    run.places = torch.tensor([first, second])
    # A full-width letter, as engines read some, is wider than its box.
    letters = ScoreBox(0.25, 1.26, 2.0, 3.0, 4.0, "<"), ScoreBox(0.0, 0.0, 0.0, 8.0, 8.0, "\uff26")
    run.score_boxes = {"ocr": ((letters, ()), ())}
    run.record_step(3)
    before, after = written(run, "steps-000001")["steps"]
    assert [group.get("credit") for group in before["groups"]] == [None, None]
    assert [group["credit"] for group in after["groups"]] == ["credit-000003"] * 2
    assert run.data("credit-000003") == {
        "step-000003/kite-0.png": {
            "unit": 1e-4,
            "scale": 50_000,
            "places": [[[625, -120]], [[0, 250]]],
            "pieces": {
                "ocr": [[["<", True, 1.3, 2, 3, 4, []], ["F", False, 0, 0, 8, 8, []]], []],
            },
        },
        "step-000003/b-0.png": {
            "unit": 0.1,
            "scale": 200,
            "places": [[[200, 0]], [[-30, 90]]],
            "pieces": {},
        },
    }
    assert "credit-000002.js" not in run.files("data")


def test_boxes_of_one_object_are_one_piece_that_is_compared_with_its_like(run: Any) -> None:
    edges, others = (1.0, 2.0, 3.0, 4.0), (5.0, 2.0, 7.0, 4.0)

    def boxes(colour: float, side: float, place: tuple[float, ...] = edges) -> ScoreBoxes:
        return (
            ScoreBox(colour, *place, text="red car .93", kind="colour:1"),
            ScoreBox(side, *place, text="red car .93", kind="position:1-0"),
        )

    run.places = torch.zeros(2, 2, 1, 1)
    further = ScoreBox(0.0, *others, text="car .50")
    # Means of 0.3 and 0.2. The first gains 0.2 and loses 0.1, the second the reverse.
    run.score_boxes = {"ocr": (((*boxes(0.5, 0.1), further), boxes(0.1, 0.3, others)), ())}
    run.record_step(1)
    written(run, "steps-000001")
    pieces = run.data("credit-000001")["step-000001/kite-0.png"]["pieces"]["ocr"]
    parts = [["colour", 0.2], ["position", -0.1]]
    assert pieces[0] == [["red car .93", True, *edges, parts], ["car .50", False, *others, []]]
    # It earned, but a fifth less than its like.
    parts = [["colour", -0.2], ["position", 0.1]]
    assert pieces[1] == [["red car .93", False, *others, parts]]


def test_step_holds_the_objects_that_were_asked_for_and_found(run: Any) -> None:
    first, second = run.prompts
    include = [{"class": "dog", "count": 2}, {"class": "car", "count": 1, "color": "red"}]
    # Other terms may use the field in another form.
    run.prompts = (
        replace(first, metadata={"include": include}),
        replace(second, metadata={"include": "dogs"}),
    )
    run.notes = (("", "asked 2 dog, found 1"), ())
    run.record_step(1)
    run.objects = {"ocr": ((("3 dog", "red car", "1 more car"), ("dog", "red car")), ())}
    run.record_step(2)
    old, new = (step["groups"][0] for step in written(run, "steps-000001")["steps"])
    assert old["asked"] == new["asked"] == ["2 dog", "red car"]
    assert "found" not in old
    right, wrong = new["found"]["ocr"]
    assert right["read"] == "3 dog, red car, 1 more car"
    # More than was asked for is no mistake where the image is right.
    assert all(is_right for _, is_right in right["marks"])
    assert wrong["marks"] == [["dog", False], [", ", True], ["red car", True]]
    second = run.data("steps-000001")["steps"][1]["groups"][1]
    assert not {"asked", "found"} & {*second}


def test_evaluation_holds_what_was_not_learned_from(run: Any) -> None:
    run.record_evaluation(10)
    data = written(run, "evaluation-000010")
    assert data["step"] == 10
    group = data["groups"][0]
    assert group["images"] == ["eval-000010/kite-0.png", "eval-000010/kite-1.png"]
    assert group["target"] == "targets/kite.png"
    assert group["notes"]["ocr"][0]["read"] == "OPFN"
    assert set(group) == {
        *("prompt_id", "prompt", "texts", "target", "decode_seed", "images", "raw", "notes"),
        "total",
    }


def test_numbers_survive_to_the_last_bit(run: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    run.raw = torch.randn((2, 2, 4), generator=generator) * torch.tensor([1e-30, 1e-3, 1.0, 1e30])
    run.record_step(1)
    groups = written(run, "steps-000001")["steps"][0]["groups"]
    table = pyarrow.parquet.read_table(run.folder.rollout_path(1))
    for name in NAMES:
        shown = [x for group in groups for x in group["raw"][name] or [math.nan] * 2]
        stored = table[f"raw/{name}"].to_numpy()
        assert np.array_equal(np.array(shown, np.float32), stored, equal_nan=True)
    for name in ("total", "penalty", "advantage"):
        shown = np.array([x for group in groups for x in group[name]], np.float32)
        assert shown.tobytes() == table[name].to_numpy().tobytes()


def test_an_image_that_a_term_refused_has_no_score_and_no_total(run: Any) -> None:
    run.raw[0, 1, 3] = run.raw[1, :, 3] = math.nan
    run.record_step(1)
    first, second = written(run, "steps-000001")["steps"][0]["groups"]
    assert first["raw"]["aesthetic"] == [0.4, None]
    assert first["total"][1] is None
    assert first["total"][0] is not None
    # Refused, and not masked as the other terms are.
    assert second["raw"] == {"lpips": None, "ssim": None, "ocr": None, "aesthetic": [None, None]}
    assert second["total"] == [None, None]


def test_marks_mind_case_where_the_term_does(run: Any) -> None:
    text = run.folder.config_path.read_text().replace(
        "case_sensitive: false", "case_sensitive: true"
    )
    run.folder.config_path.write_text(text)
    run.notes = (("OPen", "x"), ())
    run.record_step(1)
    group = written(run, "steps-000001")["steps"][0]["groups"][0]
    assert group["notes"]["ocr"][0]["marks"] == [["OP", True], ["en", False]]


def test_hostile_texts_come_through_as_they_are(run: Any) -> None:
    run.prompts = (
        replace(run.prompts[0], prompt_id=HOSTILE, prompt=HOSTILE, texts=(HOSTILE,)),
        Prompt("../../../escaped", "x"),
    )
    run.notes = ((HOSTILE, "<b>"), ())
    run.record_step(1)
    first, second = written(run, "steps-000001")["steps"][0]["groups"]
    assert first["prompt_id"] == first["prompt"] == first["texts"][0] == HOSTILE
    # Readings are shown in the form that is compared.
    assert first["notes"]["ocr"][0]["read"] == HOSTILE.replace("`", "'")
    assert second["prompt_id"] == "../../../escaped"
    for group in (first, second):
        for image in group["images"]:
            assert (run.gallery / "thumbs" / image).with_suffix(".webp").is_file()
    text = (run.gallery / "data" / "steps-000001.js").read_text(encoding="utf-8")
    assert not set(text) & {"<", "\u2028", "\u2029"}


def test_reading_is_shown_in_the_letters_it_is_compared_in(run: Any) -> None:
    # As RapidOCR returns some words: full-width letters.
    run.notes = (("\uff2f\uff30\uff25N", "x"), ())
    run.record_step(1)
    note = written(run, "steps-000001")["steps"][0]["groups"][0]["notes"]["ocr"][0]
    assert note["read"] == "OPEN"
    assert note["marks"][0][0].startswith("OP")


def test_a_run_that_learns_target_images_has_figures_and_no_groups(run: Any) -> None:
    text = run.folder.config_path.read_text().replace("method: grpo", "method: sft")
    run.folder.config_path.write_text(text)
    append_metrics(run.folder, 0, {"eval/total": 0.5})
    append_metrics(run.folder, 1, {"sft/cross_entropy": 0.25})
    assert written(run, "run")["is_sampled"] is False
    steps = written(run, "steps-000001")
    assert [row["step"] for row in steps["metrics"]] == [0, 1]
    assert steps["steps"] == []
