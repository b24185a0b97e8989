from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor
from torchvision.models.detection import FasterRCNN_ResNet50_FPN_Weights

from glm_grpo.data.prompts import load_prompts
from rewards import Detection, Prompt, score_images
from rewards.base import score_checked
from rewards.build import build_reward
from rewards.score import Scorer, Term
from rewards.score_map import Grid
from rewards.terms.clip_loading import ClipOptions
from rewards.terms.composition import CompositionConfig, CompositionReward
from rewards.terms.composition_rows import read_composition
from rewards.terms.composition_score import score_densely
from rewards.terms.detectors.loading import detector_classes, load_detector
from rewards.terms.object_colours import ObjectColours
from rewards.types import RewardError
from rewards.user_functions import name_function
from tests.rewards import tiny_detectors

CPU = torch.device("cpu")

DOG = Detection("dog", 0.9, 2.0, 2.0, 12.0, 12.0)
CAT = Detection("cat", 0.6, 30.0, 2.0, 40.0, 12.0)
FAINT = replace(DOG, score=0.15, left=20.0, right=24.0)
RED, BLUE = ({"red": part, "blue": 1 - part} for part in (0.75, 0.25))

SCENES: tuple[tuple[Detection, ...], ...] = (
    (),
    (DOG, replace(DOG, score=0.8, left=14.0, right=18.0), CAT),
    (DOG, FAINT),
    (replace(DOG, colours=RED),),
    (replace(DOG, colours=BLUE),),
    (DOG,) * 20,
)
NOTHING, TWO_DOGS, A_DOG, RED_DOG, BLUE_DOG, TWENTY_DOGS = range(len(SCENES))

TWO = {"include": [{"class": "dog", "count": 2}]}
RED_ONE = {"include": [{"class": "dog", "count": 1, "color": "red"}]}
LEFT_OF = {
    "include": [
        {"class": "cat", "count": 1},
        {"class": "dog", "count": 1, "position": ["left of", 0]},
    ]
}


def detect(pixels: UInt8[Tensor, "N 3 H W"], classes: Sequence[str]) -> list[list[Detection]]:
    """Finds the scene that an image's first pixel names."""
    CALLS.append((len(pixels), tuple(classes)))
    return [list(SCENES[int(image[0, 0, 0])]) for image in pixels]


CALLS: list[tuple[int, tuple[str, ...]]] = []
OWN = name_function(detect, "detect")


def show(*scenes: int) -> UInt8[Tensor, "N 3 40 60"]:
    images = torch.zeros(len(scenes), 3, 40, 60, dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.tensor(scenes, dtype=torch.uint8)
    return images


def asking(row: dict[str, Any], prompt_id: str = "p") -> Prompt:
    return Prompt(prompt_id, "a photo", metadata=row)


def options(**changes: Any) -> CompositionConfig:
    values = {"kind": "composition", "weight": 1.0, "detector": OWN, "clip_weights": None}
    return CompositionConfig.model_validate(values | changes)


def build(**changes: Any) -> CompositionReward:
    reward = build_reward(options(**changes), CPU)
    assert isinstance(reward, CompositionReward)
    return reward


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A detector of circles, squares and stars, of random weights."""
    return tiny_detectors.save(tmp_path_factory.mktemp("detector"), "rt_detr_v2")


@pytest.mark.parametrize(
    ("row", "scene", "dense", "wrong"),
    [
        (TWO, TWO_DOGS, 1.0, ""),
        # One of two dogs, and half of the other: 0.15 is half of the threshold, 0.3.
        (TWO, A_DOG, 0.75, "asked 2 dog, found 1"),
        # A sixth of the other: the threshold of counts is 0.9.
        (TWO | {"tag": "counting"}, A_DOG, (1 + 1 / 6) / 2, "asked 2 dog, found none"),
        (TWO, NOTHING, 0.0, "asked 2 dog, found none"),
        # The number, and the probability of the colour.
        (RED_ONE, RED_DOG, (1 + 0.75) / 2, ""),
        (RED_ONE, BLUE_DOG, (1 + 0.25) / 2, "asked red dog, found blue"),
        (LEFT_OF, TWO_DOGS, 1.0, ""),
        # The dog is there; the cat and what is left of it are not.
        (LEFT_OF, A_DOG, 1 / 3, "asked cat, found none"),
        (
            TWO | {"exclude": [{"class": "cat", "count": 1}]},
            NOTHING,
            0.5,
            "asked 2 dog, found none",
        ),
        (
            {"include": [{"class": "dog", "count": 3}], "exclude": [{"class": "cat", "count": 1}]},
            TWO_DOGS,
            1 / 3,
            "asked 3 dog, found 2; asked for no cat, found 1",
        ),
    ],
)
def test_scores_are_dense_or_a_verdict_and_notes_say_what_is_wrong(
    row: dict[str, Any], scene: int, dense: float, wrong: str
) -> None:
    prompt, pixels = asking(row), show(scene)
    scores = score_checked(build(), [prompt], pixels)
    assert scores.values.tolist() == pytest.approx([dense])
    assert scores.notes == (wrong,)
    verdict = score_checked(build(score="verdict"), [prompt], pixels)
    assert verdict.values.tolist() == [float(wrong == "")]
    assert verdict.notes == (wrong,)


@pytest.mark.parametrize("score", ["dense", "verdict"])
def test_objects_that_were_found_are_described(score: str) -> None:
    scores = score_checked(build(score=score), [asking(RED_ONE)] * 2, show(BLUE_DOG, NOTHING))
    assert scores.objects == (("blue dog",), ("no dog",))


@pytest.mark.parametrize(
    ("changes", "dense", "wrong"),
    [
        ({"threshold": 0.1}, 1.0, ""),
        ({"threshold": 0.6}, (1 + 0.25) / 2, "asked 2 dog, found 1"),
    ],
)
def test_limits_of_the_rule_are_options(changes: dict[str, Any], dense: float, wrong: str) -> None:
    scores = score_checked(build(**changes), [asking(TWO)], show(A_DOG))
    assert scores.values.tolist() == pytest.approx([dense])
    assert scores.notes == (wrong,)


def test_the_threshold_of_counts_and_the_most_objects_are_options() -> None:
    counting = asking(TWO | {"tag": "counting"})
    found = score_checked(build(counting_threshold=0.1), [counting], show(A_DOG))
    assert (found.values.tolist(), found.notes) == ([1.0], ("",))
    one = asking({"include": [{"class": "dog", "count": 1}]})
    shown = [
        score_checked(build(max_objects=most), [one], show(TWENTY_DOGS), with_map=True).score_map
        for most in (1, 18)
    ]
    # The one that was asked for, and further ones for people.
    assert [len(boxes) for ((*boxes,),) in shown] == [1, 18]


def test_margins_of_positions_are_an_option() -> None:
    # Centres 28 px apart, boxes 10 px wide each: none is left of the other within 1.4 of 20 px.
    (note,) = score_checked(build(position_margin=1.4), [asking(LEFT_OF)], show(TWO_DOGS)).notes
    assert note == "asked dog left of cat, found no clear side"


def test_objects_earn_their_parts_in_boxes_and_a_verdict_has_none() -> None:
    pixels, prompts = show(RED_DOG, A_DOG), [asking(RED_ONE), asking(TWO)]
    scores = score_checked(build(), prompts, pixels, with_map=True)
    assert isinstance(scores.score_map, tuple)
    found = [[(box.kind, box.value, box.text) for box in boxes] for boxes in scores.score_map]
    text = "red dog .90"
    assert found[0] == [("sure:0", 0.5, text), ("colour:0", 0.375, text)]
    assert found[1] == [("sure:0", 0.5, "dog .90")]
    box = scores.score_map[0][0]
    assert (box.left, box.top, box.right, box.bottom) == (2.0, 2.0, 12.0, 12.0)
    verdict = build(score="verdict")
    assert score_checked(verdict, prompts, pixels, with_map=True).score_map is None
    assert [options(score=score).has_score_map() for score in ("dense", "verdict")] == [True, False]


def test_objects_of_a_group_are_compared_like_with_like() -> None:
    scorer = Scorer([Term("composition", build(), 1.0)])
    scoring = scorer.begin([asking(RED_ONE)], grid=Grid(2, 3))
    scoring.add(show(RED_DOG, BLUE_DOG, NOTHING))
    table = scoring.finish()
    # Their colours differ by 0.25 of the score, wherever they stand; an image without a dog is not
    # in their mean.
    earned = table.kind_map["composition"][0].sum(dim=(1, 2))
    assert earned.tolist() == pytest.approx([0.125, -0.125, 0.0])


def test_images_of_a_group_are_asked_for_the_same_classes_so_many_at_once() -> None:
    CALLS.clear()
    prompts = [asking(TWO), asking(TWO), asking(LEFT_OF), asking(TWO)]
    scores = score_checked(
        build(images_at_once=2), prompts, show(TWO_DOGS, A_DOG, TWO_DOGS, NOTHING)
    )
    assert CALLS == [(2, ("dog",)), (1, ("dog",)), (1, ("cat", "dog"))]
    assert scores.values.tolist() == pytest.approx([1.0, 0.75, 1.0, 0.0])


def test_prompts_without_objects_are_left_out() -> None:
    reward = build()
    assert not reward.applies_to(Prompt("p", "a dog", metadata={"tag": "single_object"}))
    assert reward.applies_to(asking(TWO))


@pytest.mark.parametrize(
    ("changes", "row", "message"),
    [
        ({}, {"include": [{"class": "dog"}]}, r"^prompt p: include\[0\]: count is missing; "),
        (
            {"max_objects": 3},
            {"include": [{"class": "dog", "count": 4}]},
            r"^prompt p asks for 4 dog, but .*max_objects = 3 .*; raise it, or ask for fewer",
        ),
        (
            {"max_objects": 3},
            {
                "include": [{"class": "dog", "count": 1}],
                "exclude": [{"class": "dog", "count": 4}],
            },
            r"max_objects = 3",
        ),
        (
            {"detector": "stock"},
            {"include": [{"class": "circel", "count": 1}]},
            r"^prompt p asks for 'circel': .*detector '.*' knows 3 classes, not this one; "
            r"did you mean circle\?",
        ),
        (
            {"detector": "stock"},
            {"include": [{"class": "star", "count": 1}], "exclude": [{"class": "dog", "count": 1}]},
            r"asks for 'dog': .* such as circle, square, star, or a detector of any class",
        ),
        (
            {"detector": "stock"},
            {"include": [{"class": "star", "count": 1, "color": "red"}]},
            r"asks for something red, but composition.clip_weights is null and .*clip_weights=open",
        ),
    ],
)
def test_prompts_that_no_image_could_satisfy_are_refused(
    changes: dict[str, Any], row: dict[str, Any], message: str, stock: Path
) -> None:
    if changes.get("detector") == "stock":
        changes = changes | {"detector": str(stock)}
    with pytest.raises(RewardError, match=message):
        build(**changes).applies_to(asking(row))


def test_a_function_without_colours_is_named_where_a_colour_is_asked_for() -> None:
    reward = build()
    assert reward.applies_to(asking(RED_ONE))
    with pytest.raises(RewardError, match=r"prompt p asks for a colour, .* gives none for the dog"):
        reward.score([asking(RED_ONE)], show(A_DOG))


# Stock detectors, and CLIP


def test_a_stock_detector_scores_what_it_finds_with_colours_by_clip(
    stock: Path, clip_folder: Path
) -> None:
    from tests.rewards.tiny_clip import NAME  # noqa: PLC0415

    clip = {
        "clip_model": str(clip_folder / f"{NAME}.json"),
        "clip_weights": str(clip_folder / "weights.safetensors"),
    }
    config = options(detector=str(stock), **clip)
    config.check()
    reward = build_reward(config, CPU)
    row = {"include": [{"class": "square", "count": 2, "color": "blue"}]}
    assert reward.applies_to(asking(row))
    pixels = tiny_detectors.patches(2, 64, 96)
    scores = score_checked(reward, [asking(row)] * 2, pixels)
    detector = load_detector(str(stock), CPU, key="d")
    colours = ObjectColours(ClipOptions(**clip), CPU, kind="c")
    composition = read_composition(row)
    assert composition is not None
    found = detector.detect(pixels, ("square",))
    assert min(map(len, found)) > 2
    judged = colours.judge(pixels, [each[:2] for each in found])
    expected = [
        score_densely(composition, [*best, *each[2:]]).value
        for best, each in zip(judged, found, strict=True)
    ]
    assert scores.values.tolist() == pytest.approx(expected)
    assert len(reward.modules()) == 2
    sizes = [sum(each.numel() for each in module.parameters()) for module in reward.modules()]
    assert config.memory_bytes() >= 4 * sum(sizes)
    assert len(build(detector=str(stock)).modules()) == 1
    assert options(detector=str(stock)).memory_bytes() < config.memory_bytes()


def test_the_default_detector_is_in_plans_before_it_is_downloaded() -> None:
    default = CompositionConfig.model_fields["detector"].default
    assert options(detector=default).memory_bytes() == 276_000_000
    assert options(detector="owner/name").memory_bytes() == 0


# The test at the start


@pytest.fixture
def dog_image(tmp_path: Path) -> str:
    path = tmp_path / "dog.png"
    Image.fromarray(show(A_DOG)[0].permute(1, 2, 0).numpy()).save(path)
    return str(path)


def test_a_detector_that_misses_what_the_test_image_shows_is_not_built(dog_image: str) -> None:
    test = {"test_image": dog_image, "test_class": "dog"}
    assert build(**test).modules() == ()
    found = rf"test_image {dog_image}: .* finds no dog there \(best score 0\.90\); .* = 0\.95\. If"
    with pytest.raises(RewardError, match=found):
        build(threshold=0.95, **test)
    with pytest.raises(RewardError, match=r"finds no cat there \(best score 0\.00\)"):
        build(test_image=dog_image, test_class="cat")


def test_test_images_are_checked_before_anything_is_loaded(dog_image: str, stock: Path) -> None:
    with pytest.raises(RewardError, match=r"^composition.test_image no.png cannot be read"):
        options(test_image="no.png", test_class="dog").check()
    with pytest.raises(RewardError, match=r"^composition.test_class 'dog': .* knows 3 classes"):
        options(detector=str(stock), test_image=dog_image, test_class="dog").check()
    options(test_image=dog_image, test_class="dog").check()
    with pytest.raises(ValueError, match=r"is missing, although test_class is 'dog'"):
        options(test_class="dog")
    with pytest.raises(RewardError, match=r"^composition\.detector: .*has no detct"):
        options(detector=OWN.replace(":detect", ":detct")).check()
    with pytest.raises(RewardError, match=r"^composition\.clip_weights no\.pt"):
        options(clip_weights="no.pt").check()


@pytest.mark.parametrize(
    ("scenes", "warned"),
    [
        ([NOTHING] * 40, 1),
        ([NOTHING] * 31, 0),
        ([*[NOTHING] * 31, A_DOG, *[NOTHING] * 40], 0),
    ],
)
def test_a_detector_that_finds_nothing_at_first_is_named_once(
    caplog: pytest.LogCaptureFixture, scenes: list[int], warned: int
) -> None:
    reward = build()
    with caplog.at_level(logging.WARNING):
        for scene in scenes:
            reward.score([asking(TWO)], show(scene))
    assert len(caplog.records) == warned
    for record in caplog.records:
        assert "found none of the objects that prompts ask for in the first 32 images" in (
            record.getMessage()
        )


# As other terms


def test_own_images_are_scored_by_the_metadata_of_their_prompts() -> None:
    config = {"terms": {"composition": options().model_dump(exclude={"kind"})}}
    images = [Image.fromarray(each.permute(1, 2, 0).numpy()) for each in show(TWO_DOGS, A_DOG)]
    found = score_images([asking(TWO)] * 2, images, config)
    assert found.composition.tolist() == pytest.approx([1.0, 0.75])
    with pytest.warns(UserWarning, match=r"needs objects, Prompt\(\.\.\., metadata=\{'include'"):
        score_images(["two dogs"], images[:1], config)


def test_a_function_of_a_file_is_a_detector_whose_source_is_known(tmp_path: Path) -> None:
    source = (
        "from rewards import Detection\n"
        "def detect(pixels, classes):\n"
        "    box = (0.0, 0.0, 8.0, 8.0)\n"
        "    return [[Detection(classes[0], 0.9, *box, colours={'red': 1.0})] for _ in pixels]\n"
    )
    (tmp_path / "find.py").write_text(source)
    config = options(detector="find.py:detect", folder=str(tmp_path))
    config.check()
    scores = score_checked(build_reward(config, CPU), [asking(RED_ONE)], show(NOTHING))
    assert scores.values.tolist() == [1.0]
    function = config.users_function()
    assert function is not None
    assert (function.option, function.folder) == ("detector", str(tmp_path))
    assert function.sources() == {"find.py": source.encode()}
    assert options(detector="owner/name").users_function() is None


def test_classes_that_a_function_declares_are_checked(tmp_path: Path) -> None:
    source = "def detect(pixels, classes):\n    return [[] for _ in pixels]\n"
    for declared in ("", "detect.classes = ('dog', 'car')\n"):
        folder = tmp_path / str(len(declared))
        folder.mkdir()
        (folder / "find.py").write_text(source + declared)
        config = options(detector="find.py:detect", folder=str(folder))
        rows = {"a": {"include": [{"class": "dogs", "count": 1}]}}
        problems = [*config.check_metadata(rows)]
        assert ["'dogs'" in each for each in problems] == [True] * bool(declared)


COCO = {
    "architectures": ["RTDetrV2ForObjectDetection"],
    "id2label": dict(enumerate(FasterRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"])),
}
"""Config of a detector of COCO's classes."""


def test_geneval_s_own_file_gives_prompts_to_which_the_term_applies(
    assets_dir: Path, tmp_path: Path
) -> None:
    path = assets_dir / "prompts" / "geneval_metadata.jsonl"
    prompts = load_prompts(str(path), height=32, width=32)
    reward = build()
    assert all(reward.applies_to(prompt) for prompt in prompts)
    (tmp_path / "config.json").write_text(json.dumps(COCO))
    known = detector_classes(str(tmp_path), key="d")
    asked = {each["class"] for prompt in prompts for each in prompt.metadata["include"]}
    assert known is not None
    assert asked <= {*known}
    first = json.loads(path.read_text().splitlines()[0])
    assert prompts[0].metadata["include"] == first["include"]
    # Of nothing, all is missing: each wanted object is a reason.
    scores = score_checked(reward, list(prompts), show(*[NOTHING] * len(prompts)))
    assert scores.notes[0] == f"asked {first['include'][0]['class']}, found none"
    assert all(scores.notes)
