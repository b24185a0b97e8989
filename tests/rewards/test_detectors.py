from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError
from jaxtyping import Float32, UInt8
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import (
    Mask2FormerImageProcessor,
    RTDetrImageProcessor,
)

from rewards.detection import Detection
from rewards.terms.detectors.base import Detector, Limits, detections_of_boxes
from rewards.terms.detectors.loading import (
    check_detector,
    detector_classes,
    detector_memory_bytes,
    load_detector,
)
from rewards.types import RewardError
from tests.rewards.tiny_detectors import LABELS, OWL_SIDE, patches, save

CPU = torch.device("cpu")
KEY = "composition.detector"
ALL = Limits(floor=0.0, max_per_class=1000)
ASKED = ("star", "circle")

Save = Callable[[str], Path]
Found = tuple[str, float, tuple[float, float, float, float]]
"""Class, score and box of what a reference found."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Saves a detector, once."""
    folder = tmp_path_factory.mktemp("detectors")

    def find(kind: str) -> Path:
        return folder / kind if (folder / kind).is_dir() else save(folder, kind)

    return find


@pytest.fixture
def copied(saved: Save, tmp_path: Path) -> Save:
    """Copies a detector, to be changed."""
    return lambda kind: Path(shutil.copytree(saved(kind), tmp_path / kind))


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(repository: str, *arguments: Any, **options: Any) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)


def load(folder: Path, limits: Limits = ALL) -> Detector:
    return load_detector(str(folder), CPU, key=KEY, limits=limits)


def model_of(folder: Path) -> Any:
    """The stock model, loaded by itself."""
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()


def overlap(first: Sequence[float], second: Sequence[float]) -> float:
    """Intersection over union of two boxes."""
    sides = [min(first[i + 2], second[i + 2]) - max(first[i], second[i]) for i in (0, 1)]
    shared = max(sides[0], 0) * max(sides[1], 0)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (first, second)]
    return shared / (sum(areas) - shared)


def best_on_each_place(found: Sequence[Found]) -> list[Found]:
    kept: list[Found] = []
    for each in sorted(found, key=lambda one: -one[1]):
        if all(overlap(each[2], other[2]) < 0.6 for other in kept):
            kept.append(each)
    return kept


def boxes_of(
    scores: Float32[Tensor, "Q C"],
    centred: Float32[Tensor, "Q 4"],
    labels: Sequence[str],
    *,
    scale: tuple[int, int],
    size: tuple[int, int],
) -> list[Found]:
    """What a detector of boxes finds in an image, of all its classes."""
    found = []
    for of_query, (x, y, width, height) in zip(scores.tolist(), centred.tolist(), strict=True):
        best = max(range(len(labels)), key=of_query.__getitem__)
        edges = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
        cut = [
            min(max(edge * scale[axis % 2], 0.0), size[axis % 2]) for axis, edge in enumerate(edges)
        ]
        if cut[2] - cut[0] >= 1 and cut[3] - cut[1] >= 1:
            found.append((labels[best], of_query[best], tuple(cut)))
    return best_on_each_place(found)


def assert_equal(
    detections: Sequence[Detection], expected: Sequence[Found], *, tolerance: float = 1e-4
) -> None:
    assert [each.label for each in detections] == [label for label, _, _ in expected]
    scores = [each.score for each in detections]
    assert scores == pytest.approx([score for _, score, _ in expected], abs=tolerance)
    for each, (_, _, box) in zip(detections, expected, strict=True):
        assert (each.left, each.top, each.right, each.bottom) == pytest.approx(box, abs=0.01)


def as_input(
    image: UInt8[Tensor, "3 H W"], size: tuple[int, int], mean: list[float], std: list[float]
) -> Float32[Tensor, "1 3 h w"]:
    """An image resized by Pillow and normalised; a size is width and height."""
    resized = Image.fromarray(image.permute(1, 2, 0).numpy()).resize(
        size, Image.Resampling.BILINEAR
    )
    colours = (np.array(resized) / 255 - mean) / std
    return torch.from_numpy(colours).permute(2, 0, 1)[None].float()


# Mask2Former


@pytest.mark.parametrize(
    ("height", "width", "prepared", "padded"),
    [
        (384, 384, (800, 800), (800, 800)),
        (1024, 1024, (800, 800), (800, 800)),
        # The longest edge is at most 1333, and padded to a multiple of 32.
        (384, 768, (667, 1333), (672, 1344)),
    ],
)
def test_mask2former_finds_what_the_published_rule_finds(
    height: int, width: int, prepared: tuple[int, int], padded: tuple[int, int], saved: Save
) -> None:
    folder, (image,) = saved("mask2former"), patches(1, height, width)
    inputs = torch.zeros(1, 3, *padded)
    inputs[:, :, : prepared[0], : prepared[1]] = as_input(
        image, (prepared[1], prepared[0]), [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    )
    with torch.no_grad():
        output = model_of(folder)(pixel_values=inputs)
    probabilities = output.class_queries_logits[0].softmax(dim=-1)
    pairs = [(query, label) for query in range(36) for label in range(3)]
    pairs.sort(key=lambda pair: -probabilities[pair].item())
    masks = interpolate(output.masks_queries_logits, padded, mode="bilinear")
    masks = masks[:, :, : prepared[0], : prepared[1]]
    masks = interpolate(masks, (height, width), mode="bilinear")[0].numpy()
    expected = []
    for query, label in pairs[:100]:
        inside = masks[query] > 0
        if LABELS[label] in ASKED and inside.any():
            certainty = (1 / (1 + np.exp(-masks[query][inside]))).mean()
            score = probabilities[query, label].item() * certainty
            expected.append((LABELS[label], score, query))
    expected.sort(key=lambda each: -each[1])
    (found,) = load(folder).detect(image[None], ASKED)
    assert [each.label for each in found] == [label for label, _, _ in expected]
    scores = [each.score for each in found]
    # Pillow and torchvision differ by one of 255 levels here and there.
    assert scores == pytest.approx([score for _, score, _ in expected], abs=2e-3)
    for each, (_, _, query) in zip(found, expected, strict=True):
        inside = masks[query] > 0
        assert each.mask.shape == (height, width)
        assert (each.mask.numpy() != inside).mean() < 2e-3
        rows, columns = np.nonzero(each.mask.numpy())
        bounds = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
        assert (each.left, each.top, each.right, each.bottom) == bounds
    # The rule on the best 100 pairs applied, and not all masks are alike.
    asked = sum(LABELS[label] in ASKED for _, label in pairs)
    assert len(expected) < asked
    boxes = {(each.left, each.top, each.right, each.bottom) for each in found}
    assert len(boxes) > 3


def test_mask2former_without_resizing_takes_images_as_they_are(
    copied: Save,
) -> None:
    folder = copied("mask2former")
    processor = Mask2FormerImageProcessor(
        do_resize=False, image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.3, 0.4]
    )
    processor.save_pretrained(folder)
    detector, images = load(folder), patches(3, 64, 96)
    inputs = as_input(images[2], (96, 64), [0.5, 0.4, 0.3], [0.2, 0.3, 0.4])
    with torch.no_grad():
        output = model_of(folder)(pixel_values=inputs)
    highest = output.class_queries_logits[0].softmax(dim=-1)[:, :3].amax().item()
    together = detector.detect(images, LABELS)
    assert len(together) == 3
    assert 0.5 * highest < together[2][0].score <= highest
    for image, found in zip(images, together, strict=True):
        (alone,) = detector.detect(image[None], LABELS)
        # A pixel on a mask's edge may differ.
        assert_equal(found, [of(each) for each in alone], tolerance=2e-3)


def of(detection: Detection) -> Found:
    box = (detection.left, detection.top, detection.right, detection.bottom)
    return detection.label, detection.score, box


def test_limits_keep_the_best_of_each_class(saved: Save) -> None:
    image = patches(1, 96, 96)
    (whole,) = load(saved("d_fine")).detect(image, LABELS)
    (found,) = load(saved("d_fine"), Limits(floor=0.26, max_per_class=5)).detect(image, LABELS)
    expected = []
    for each in map(of, whole):
        if each[1] > 0.26 and sum(other[0] == each[0] for other in expected) < 5:
            expected.append(each)
    assert 1 < len(expected) < len(whole)
    assert list(map(of, found)) == expected


@pytest.mark.parametrize("kind", ["mask2former", "rt_detr", "owlv2", "grounding_dino"])
def test_an_image_without_candidates_has_no_detections(kind: str, saved: Save) -> None:
    detector = load(saved(kind), Limits(floor=1.0))
    assert detector.detect(patches(2, 64, 64), ("star",)) == [[], []]


# Boxes


@pytest.mark.parametrize("kind", ["rt_detr", "rt_detr_v2", "d_fine"])
def test_box_detectors_without_a_processor_see_colours_from_0_to_1(kind: str, saved: Save) -> None:
    folder, images = saved(kind), patches(2, 96, 128)
    model = model_of(folder)
    found = load(folder).detect(images, LABELS)
    for image, detections in zip(images, found, strict=True):
        with torch.no_grad():
            output = model(pixel_values=image[None] / 255)
        expected = boxes_of(
            output.logits[0].sigmoid(),
            output.pred_boxes[0],
            LABELS,
            scale=(128, 96),
            size=(128, 96),
        )
        assert all(each.mask is None for each in detections)
        assert_equal(detections, expected)
    assert len(found[0]) > 3


@pytest.mark.parametrize("side", [None, 64])
def test_box_detectors_use_the_image_processor_that_they_have(
    side: int | None, copied: Save
) -> None:
    folder = copied("rt_detr_v2")
    processor = RTDetrImageProcessor(
        do_resize=side is not None,
        size={"height": 64, "width": 64},
        do_normalize=True,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    processor.save_pretrained(folder)
    images = patches(1, 96, 128)
    size = (128, 96) if side is None else (side, side)
    with torch.no_grad():
        output = model_of(folder)(pixel_values=as_input(images[0], size, [0.5] * 3, [0.5] * 3))
    expected = boxes_of(
        output.logits[0].sigmoid(), output.pred_boxes[0], LABELS, scale=(128, 96), size=(128, 96)
    )
    (found,) = load(folder).detect(images, LABELS)
    assert_equal(found, expected, tolerance=1e-3)
    assert found


@pytest.mark.parametrize("kind", ["rt_detr_v2", "d_fine"])
def test_box_detectors_without_a_processor_name_the_sizes_that_they_take(
    kind: str, saved: Save
) -> None:
    detector = load(saved(kind))
    detector.detect(patches(1, 64, 96), ("star",))
    with pytest.raises(RewardError, match="has 90 x 64 pixels, .* only multiples of 32: scale it"):
        detector.detect(patches(1, 64, 90), ("star",))


def test_of_boxes_on_the_same_place_the_best_stays_whatever_its_class() -> None:
    boxes = torch.tensor(
        [
            [0.0, 0.0, 10.0, 10.0],
            [0.0, 0.0, 10.0, 6.0],  # .6 of the first: the same place
            [20.0, 0.0, 30.0, 10.0],
            [20.0, 0.0, 30.0, 5.9],  # .59 of the one before: another place
            [40.0, 0.0, 50.0, 10.0],
            [40.0, 0.0, 50.0, 10.0],
            [60.0, 0.0, 70.0, 0.9],  # less than a pixel is in the image
        ]
    )
    scores = torch.tensor(
        [[0.5, 0.1], [0.8, 0.7], [0.4, 0.3], [0.2, 0.1], [0.6, 0.1], [0.1, 0.9], [0.9, 0.1]]
    )
    found = detections_of_boxes(scores, boxes, ("cat", "dog"), asked=("cat",), limits=ALL)
    # The dog on the cat's place was not asked for; it is still the best there.
    assert [(each.label, round(each.score, 3), each.left, each.bottom) for each in found] == [
        ("cat", 0.8, 0.0, 6.0),
        ("cat", 0.4, 20.0, 10.0),
        ("cat", 0.2, 20.0, pytest.approx(5.9)),
    ]


# Zero-shot


def test_owlv2_is_asked_for_photos_of_the_classes(saved: Save) -> None:
    folder, images = saved("owlv2"), patches(2, 48, 72)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = model_of(folder)
    detector = load(folder)
    assert detector.classes() is None
    found = detector.detect(images, ("dog", "cat"))
    for image, detections in zip(images, found, strict=True):
        texts = [["a photo of a dog", "a photo of a cat"]]
        inputs = processor(
            text=texts, images=image, return_tensors="pt", padding="max_length", max_length=40
        )
        assert inputs["pixel_values"].shape == (1, 3, OWL_SIDE, OWL_SIDE)
        with torch.no_grad():
            output = model(**inputs)
        # Images are padded to a square at their lower edge.
        expected = boxes_of(
            output.logits[0].sigmoid(),
            output.pred_boxes[0],
            ("dog", "cat"),
            scale=(72, 72),
            size=(72, 48),
        )
        assert_equal(detections, expected)
    assert len({each.label for detections in found for each in detections}) == 2


def test_owlv2_refuses_a_name_of_which_it_would_read_the_beginning(saved: Save) -> None:
    detector = load(saved("owlv2"))
    # A token for each letter, and two at the ends, for a model of 40 tokens.
    with pytest.raises(RewardError, match=r"'a photo of a x{30}' is 41 tokens, .* at most 40; use"):
        detector.detect(patches(1, 48, 72), ["dog", "x" * 30])


def test_grounding_dino_scores_a_class_by_the_best_of_its_own_tokens(saved: Save) -> None:
    folder, images = saved("grounding_dino"), patches(2, 48, 72)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = model_of(folder)
    found = load(folder).detect(images, ("Fire hydrant", "star"))
    for image, detections in zip(images, found, strict=True):
        inputs = processor(text="fire hydrant. star.", images=image, return_tensors="pt")
        # [CLS] fire hydrant . star . [SEP]
        assert inputs["input_ids"].tolist() == [[101, 4, 5, 1012, 2, 1012, 102]]
        with torch.no_grad():
            output = model(**inputs)
        probabilities = output.logits[0].sigmoid()
        scores = torch.stack([probabilities[:, 1:3].amax(dim=1), probabilities[:, 4]], dim=1)
        labels = ("Fire hydrant", "star")
        expected = boxes_of(scores, output.pred_boxes[0], labels, scale=(72, 48), size=(72, 48))
        assert_equal(detections, expected)
    assert len({each.label for detections in found for each in detections}) == 2


def test_grounding_dino_refuses_more_names_than_it_reads(saved: Save) -> None:
    detector = load(saved("grounding_dino"))
    # [CLS], eight times star and dot, [SEP], for a model of 16 tokens.
    with pytest.raises(RewardError, match="names of 8 classes are 18 tokens, .* at most 16; ask"):
        detector.detect(patches(1, 48, 72), ["star"] * 8)


# Files


@pytest.mark.parametrize("kind", ["mask2former", "rt_detr_v2", "grounding_dino"])
def test_detectors_are_loaded_frozen_in_float32(kind: str, copied: Save) -> None:
    folder = copied(kind)
    # Published models may be stored in half precision.
    state = load_file(folder / "model.safetensors")
    halves = {
        name: part.half() if part.is_floating_point() else part for name, part in state.items()
    }
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    (model,) = load(folder).modules()
    assert not model.training
    assert {part.dtype for part in model.parameters()} == {torch.float32}
    assert not any(part.requires_grad for part in model.parameters())
    # Tied weights are stored once.
    assert detector_memory_bytes(str(folder)) == 4 * sum(part.numel() for part in state.values())


def test_classes_are_read_from_the_config_and_coco_s_have_geneval_s_names(copied: Save) -> None:
    folder = copied("rt_detr")
    assert detector_classes(str(folder), key=KEY) == LABELS
    change_config(folder, id2label={"1": "mouse", "0": "keyboard", "2": "remote", "10": "sofa"})
    names = ("computer keyboard", "computer mouse", "tv remote", "couch")
    assert detector_classes(str(folder), key=KEY) == names
    change_config(folder, id2label={"0": "mouse", "1": "cat"})
    assert detector_classes(str(folder), key=KEY) == ("mouse", "cat")
    assert detector_classes(str(copied("owlv2")), key=KEY) is None


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes), encoding="utf-8")


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("kind", "damage", "problem", "remedy"),
    [
        ("rt_detr", without("config.json"), "has no config.json", "save_pretrained"),
        (
            "rt_detr",
            lambda folder: (folder / "config.json").write_text("{"),
            "config.json is not JSON",
            "copy it from the model's hub page",
        ),
        (
            "rt_detr",
            lambda folder: change_config(folder, architectures=["DetrForObjectDetection"]),
            "is a DetrForObjectDetection; it must be one of Mask2FormerForUniversalSegmentation,",
            "name it file.py:detect",
        ),
        (
            "rt_detr",
            lambda folder: change_config(folder, architectures=None),
            "names no architecture in config.json",
            "it must be one of",
        ),
        (
            "rt_detr",
            lambda folder: change_config(folder, id2label=None),
            "has no id2label in config.json",
            "set model.config.id2label",
        ),
        ("rt_detr", without("model.safetensors"), "has no weights", ".safetensors files"),
        (
            "owlv2",
            without("processor_config.json"),
            "has no processor",
            "processor.save_pretrained(folder)",
        ),
        (
            "owlv2",
            without("tokenizer_config.json"),
            "has no processor",
            "processor.save_pretrained(folder)",
        ),
    ],
)
def test_a_damaged_folder_is_refused_before_weights_are_loaded(
    kind: str, damage: Callable[[Path], None], problem: str, remedy: str, copied: Save
) -> None:
    folder = copied(kind)
    check_detector(str(folder), key=KEY)
    damage(folder)
    for use in (check_detector, lambda name, key: load_detector(name, CPU, key=key)):
        with pytest.raises(RewardError) as caught:
            use(str(folder), key=KEY)
        assert str(caught.value).startswith(f"{KEY} {str(folder)!r}")
        assert problem in str(caught.value)
        assert remedy in str(caught.value)


def test_a_hub_id_is_refused_at_once_without_a_network(no_hub: None) -> None:
    with pytest.raises(RewardError, match=rf"^{KEY} 'owner/detector' .*no network") as caught:
        check_detector("owner/detector", key=KEY)
    assert "--local-dir FOLDER" in str(caught.value)
    assert detector_memory_bytes("owner/detector") == 0


def test_a_hub_id_is_downloaded_without_what_is_not_needed(
    saved: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = saved("rt_detr"), []

    def find(repository: str, file: str) -> str:
        asked.append((repository, file))
        return str(folder / file)

    def download(repository: str, *, allow_patterns: list[str]) -> str:
        asked.append((repository, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", find)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    load_detector("owner/detector", CPU, key=KEY)
    assert asked == [
        ("owner/detector", "config.json"),
        ("owner/detector", ["*.json", "*.safetensors", "*.txt"]),
    ]


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("mask2former", "class_predictor.weight"),
        ("rt_detr_v2", "model.encoder_input_proj.0.1.running_mean"),
    ],
)
def test_a_detector_that_lacks_weights_is_refused(kind: str, missing: str, copied: Save) -> None:
    # transformers would draw the missing ones.
    folder = copied(kind)
    remove_weights(folder, missing)
    generator = torch.get_rng_state()
    with pytest.raises(RewardError, match=rf"^{KEY} .*it lacks {re.escape(missing)}\)"):
        load(folder)
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_detector_may_lack_the_weights_of_its_loss(copied: Save) -> None:
    folder = copied("mask2former")
    remove_weights(folder, "criterion.empty_weight")
    assert load(folder).classes() == LABELS


def remove_weights(folder: Path, name: str) -> None:
    state = load_file(folder / "model.safetensors")
    del state[name]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


# Functions of one's own


def detector_of(
    folder: Path, body: str, monkeypatch: pytest.MonkeyPatch, *, signature: str = "pixels, classes"
) -> Detector:
    """A function of a file, whose last lines are `body`."""
    monkeypatch.chdir(folder)
    (folder / "mine.py").write_text(
        "import torch\nfrom rewards.detection import Detection\n\n\n"
        f"def detect({signature}):\n    {body}\n",
        encoding="utf-8",
    )
    return load_detector("mine.py:detect", CPU, key=KEY, limits=ALL)


def test_a_function_finds_what_was_asked_for_cut_to_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = (
        "assert pixels.dtype == torch.uint8 and classes == ['cat', 'dog']\n"
        "    pixels.zero_()\n"
        "    mask = torch.ones(8, 6, dtype=torch.bool)\n"
        "    found = [Detection('cat', 0.25, -1.0, 2.0, 3.0, 9.0),\n"
        "             Detection('owl', 7.0, 0.0, 0.0, 0.0, 0.0),\n"
        "             Detection('dog', 0.5, 1.0, 1.0, 2.5, 3.0, mask, {'red': 1.0})]\n"
        "    return [found, ()]"
    )
    detector, pixels = detector_of(tmp_path, body, monkeypatch), patches(2, 8, 6)
    before = pixels.clone()
    (first, second) = detector.detect(pixels, ("cat", "dog"))
    assert torch.equal(pixels, before)
    assert second == []
    assert list(map(of, first)) == [("dog", 0.5, (1, 1, 2.5, 3)), ("cat", 0.25, (0, 2, 3, 8))]
    assert first[0].mask.all()
    assert first[0].colours == {"red": 1.0}
    assert detector.classes() is None
    assert detector.modules() == ()
    assert detector_memory_bytes("mine.py:detect") == 0
    check_detector("mine.py:detect", key=KEY)


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ("None", "returned NoneType for 1 images; it must return one list of rewards.Detection"),
        ("[[], []]", "returned list of 2 for 1 images"),
        ("[{'cat': 1}]", "image 0: {'cat': 1} is not a list of rewards.Detection"),
        ("[[('cat', 0.5)]]", "image 0: [('cat', 0.5)] is not a list of rewards.Detection"),
        (
            "cat(score=float('nan'))",
            "image 0: cat: its score is nan; it must be a number from 0 to 1",
        ),
        ("cat(score=1.5)", "its score is 1.5"),
        ("cat(left=float('inf'))", "its edges must be finite numbers"),
        ("cat(left=3, right=2)", "it must be left, top, right, bottom, not left, top, width"),
        ("cat(left=6, right=8)", "is outside the image, 6 x 8"),
        ("cat(mask=torch.ones(8, 6))", "its mask is torch.float32 (8, 6); it must be a torch.bool"),
        (
            "cat(mask=torch.ones(6, 8, dtype=torch.bool))",
            "must be a torch.bool tensor of shape (8, 6)",
        ),
        ("cat(colours={'red': 2})", "its colours are {'red': 2}; they must be probabilities"),
        ("cat(colours={})", "its colours are {}"),
        # The first of equal colours would be the object's.
        ("cat(colours={'red': 0.0, 'blue': 0.0})", "at least one above 0"),
        ("cat(colours={'Red': 0.9})", "its colour 'Red' must be written 'red'"),
        # What would be overlooked, as if the image did not show it.
        ("cat(label=15)", "image 0: 15: its label is of type int; it must be the name of a class"),
        ("cat(label=' Cat')", "asked for 'cat'; return names of classes exactly as they are given"),
        ("cat(left=0.25, right=0.75)", "no box ends after pixel 1; boxes are in pixels: multiply"),
    ],
)
def test_what_a_function_must_not_return_is_refused(
    returned: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Past the types that are checked in tests only.
    body = (
        "def cat(**changes):\n"
        "        found = Detection('cat', 0.5, 0.0, 0.0, 1.0, 1.0)\n"
        "        found.__dict__.update(changes)\n"
        "        return [[found]]\n"
        f"    return {returned}"
    )
    detector = detector_of(tmp_path, body, monkeypatch)
    with pytest.raises(RewardError) as caught:
        detector.detect(patches(1, 8, 6), ("cat",))
    assert str(caught.value).startswith(f"{KEY} 'mine.py:detect': ")
    assert problem in str(caught.value)


def test_a_function_may_return_the_numbers_of_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = (
        "found = Detection('cat', 0.5, 0.0, 0.0, 1.0, 1.0)\n"
        "    numbers = zip(('score', 'left', 'top', 'right', 'bottom'),\n"
        "                  torch.tensor([0.75, 1.0, 2.0, 3.0, 4.0]))\n"
        "    found.__dict__.update(numbers, colours={'red': torch.tensor(0.5)})\n"
        "    return [[found]]"
    )
    ((found,),) = detector_of(tmp_path, body, monkeypatch).detect(patches(1, 8, 6), ("cat",))
    assert found == Detection("cat", 0.75, 1.0, 2.0, 3.0, 4.0, colours={"red": 0.5})
    assert type(found.score) is float


def test_a_function_that_cannot_be_called_is_refused_at_the_door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RewardError, match=rf"^{KEY} .*def detect\(pixels, classes\)"):
        detector_of(tmp_path, "return []", monkeypatch, signature="pixels")
    with pytest.raises(RewardError, match=rf"^{KEY}: .*has no detct; did you mean detect\?"):
        check_detector("mine.py:detct", key=KEY)
    with pytest.raises(RewardError, match=rf"^{KEY} 'mine\.py' names no function.*mine\.py:detect"):
        check_detector("mine.py", key=KEY)
