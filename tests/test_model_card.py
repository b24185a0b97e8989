"""The page of an export says of a run only what is so."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from glm_grpo.commands.model_card import Description, describe_training
from glm_grpo.config.sections import SftSection
from glm_grpo.models.export_page import describe_decoding
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.provenance import Provenance, write_provenance
from glm_grpo.run.writing import append_metrics, write_evaluation
from tests.factories import tiny_config
from tests.run.conftest import build

ORIGIN = Provenance(
    began="2026-01-01T00:00:00+00:00",
    held_out={"sign": "1", "field-1": "2"},
    training={str(index): f"{index}" for index in range(1200)},
    files={},
    code={},
    versions={},
    shared=(),
)
STEP = {"reward/mean": 0.5, "time/step": 2.0}


@pytest.fixture
def describe(tmp_path: Path):
    """Describes a run of two steps, evaluated before the first and after some."""

    def describe(
        *overrides: str,
        provenance: Provenance = ORIGIN,
        rows: tuple[dict[str, float], ...] = (STEP, STEP),
        evaluated: tuple[int, ...] = (0, 2),
        **sections: object,
    ) -> Description:
        folder = RunFolder(tmp_path / "run")
        for step, row in enumerate(({}, *rows)):
            more = {}
            if step in evaluated:
                write_evaluation(folder, replace(build(), step=step), combine="weighted_sum")
                more = {"eval/total": 0.1}
            append_metrics(folder, step, row | more)
        write_provenance(folder, provenance)
        config = tiny_config("train.steps=2", *overrides).model_copy(update=sections)
        return describe_training(folder, config, step=len(rows))

    return describe


def row_of(description: Description, setting: str) -> str:
    (value,) = re.findall(rf"^\| {setting} \| (.*) \|$", description.training, flags=re.MULTILINE)
    return value


def row_with(results: str, score: str) -> str:
    (row,) = re.findall(rf"^\| {score} \| [\d.]+ \| (?!\d).*$", results, flags=re.MULTILINE)
    return row


@pytest.mark.parametrize(
    ("shared", "said"),
    [
        ((), "2 held-out prompts, none .* training prompt,"),
        (("sign",), "2 held-out prompts, .* 1 training prompt,"),
        (None, "2 held-out prompts, at"),
    ],
)
def test_page_says_which_held_out_prompts_are_trained_on(describe, shared, said) -> None:
    described = describe(provenance=replace(ORIGIN, shared=shared))
    assert re.search(said, described.results)


def test_page_carries_the_cautions_of_its_scores(describe) -> None:
    # The embedded model's reward: LPIPS without trained features, and a small CLIP.
    results = describe().results
    assert "do not measure human perception" in row_with(results, "lpips")
    assert "small demonstration CLIP" in row_with(results, "aesthetic")
    assert "demonstration" not in row_with(results, "ssim")


def test_page_speaks_of_no_other_terms_where_there_is_one(describe) -> None:
    others = [f"~reward.terms.{name}" for name in ("ssim", "ocr", "aesthetic")]
    results = describe(*others).results
    assert "`total` is the score times its weight.\n" in results
    assert "share its weight" not in results


def test_page_is_titled_with_the_name_of_the_run(describe) -> None:
    assert describe("run.name=larger_groups").name == r"larger\_groups"
    assert describe().name is None


def test_cost_counts_groups_that_were_replaced(describe) -> None:
    replaced = STEP | {"advantage/discarded_groups": 3.0}
    words = ("rollout.prompts_per_step=2", "rollout.group_size=4")
    # 2 steps x 2 groups, and 3 more.
    assert row_of(describe(*words, rows=(STEP, replaced)), "cost").startswith(
        "28 images sampled for training, 0:00:04"
    )


def test_page_of_a_short_run(describe) -> None:
    described = describe("rollout.prompts_per_step=1", rows=(STEP,), evaluated=(0, 1))
    assert re.search("1 step of 1 prompt .* 1,200", described.summary)
    each = f"1 prompt with {tiny_config().rollout.group_size} images per prompt"
    assert row_of(described, "steps") == f"1 of 2 planned, each on {each}"
    # There are too few prompts for one.
    assert "intervals are" not in described.results


def test_page_names_the_step_of_its_scores_and_of_its_weights(describe) -> None:
    described = describe(rows=(STEP, STEP, STEP))
    assert re.search("step 2 .* step 3", described.results)


def test_page_without_scores_says_up_to_which_step(describe) -> None:
    described = describe(evaluated=(0,))
    assert re.search("no evaluation .* step 2", described.results)


def test_page_warns_of_canaries_that_were_outside_when_last_measured(describe) -> None:
    outside = STEP | {"canary/departures": 1.0}
    assert "canaries" in describe(rows=(outside, STEP)).results


def test_page_warns_of_scores_that_changed_their_meaning(describe) -> None:
    described = describe(provenance=replace(ORIGIN, changed=("reward.terms.ocr.function",)))
    assert "`reward.terms.ocr.function`" in described.results


def test_page_names_the_detector_by_which_objects_were_found(describe) -> None:
    described = describe("+reward.terms.composition={weight: 0.1, detector: owner/detector}")
    assert re.search(r"\| composition \| 0.1 \| .*a detector. `owner/detector`", described.results)
    (function,) = re.findall(
        r"`.*:detect`",
        describe("+reward.terms.composition={weight: 0.1, detector: 'find.py:detect'}").results,
    )
    assert function == "`find.py:detect`"


def test_page_names_the_sampler_and_what_read_the_images(describe) -> None:
    described = describe(
        "rollout.top_k=50", provenance=replace(ORIGIN, versions={"rapidocr": "3.8"})
    )
    assert row_of(described, "sampling") == "temperature 1, top_k 50"
    assert row_of(described, "term ocr") == "RapidOCR (rapidocr 3.8)"


def test_page_shows_the_best_of_several_images_beside_their_mean(describe) -> None:
    # Of the prompt with text, images score 0.00 and 0.01 before and after.
    assert "| ocr | 1 | base | 0.005 | - | 0.010 | - |" in describe().groups
    assert "|  |  | over best@2 | -0.005 | - |" in describe().groups


def test_page_of_supervised_fine_tuning_has_no_samples(describe) -> None:
    described = describe("train.method=sft", rows=({"time/step": 2.0},) * 2)
    prompts = tiny_config().rollout.prompts_per_step
    assert row_of(described, "steps") == f"2, each on the target images of {prompts} prompts"
    assert row_of(described, "cost").startswith("0:00:04")
    assert "not trained on" in described.results


def test_page_names_what_else_shaped_the_weights(describe) -> None:
    described = describe(
        "model.start_from=other",
        "train.mode=async",
        "train.epochs_per_rollout=2",
        "train.minibatches=3",
        "eval.ema_decay=0.9",
        "decode.rollout_steps=1",
        sft=SftSection(weight=0.1),
    )
    assert "from the weights of another run" in described.summary
    assert "target images, asynchronous" in row_of(described, "method")
    assert row_of(described, "trained").endswith("; these are a moving average (decay 0.9)")
    assert row_of(described, "optimizer").startswith("AdamW, 6 updates per step, ")
    evaluated = describe_decoding(tiny_config().decode)
    assert row_of(described, "decoding") == f"{evaluated}; in training 1 step"
