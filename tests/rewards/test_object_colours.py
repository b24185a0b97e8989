from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.nn.functional import normalize

from rewards.detection import Detection
from rewards.terms.clip_loading import ClipOptions
from rewards.terms.object_colours import (
    COLOURS,
    ObjectColours,
    check_object_colours,
    cut_out,
    object_colours_bytes,
)
from rewards.types import RewardError
from tests.rewards.tiny_clip import NAME, embed_captions, embed_images, noise

CPU = torch.device("cpu")


def options(folder: Path, **changes: str) -> ClipOptions:
    files = {
        "clip_model": str(folder / f"{NAME}.json"),
        "clip_weights": str(folder / "weights.safetensors"),
    }
    return ClipOptions(**(files | changes))


@pytest.fixture(scope="module")
def judge(clip_folder: Path) -> ObjectColours:
    return ObjectColours(options(clip_folder), CPU, kind="composition")


def test_colours_are_a_softmax_over_the_mean_of_three_captions(
    judge: ObjectColours, clip_folder: Path
) -> None:
    pixels = noise(2)
    mask = torch.zeros(40, 60, dtype=torch.bool)
    mask[5:20, 10:40] = True
    car = Detection("car", 0.9, 10.0, 5.0, 40.0, 20.0, mask=mask)
    dog = Detection("dog", 0.8, 3.4, 2.5, 30.6, 33.5)
    found = judge.judge(pixels, [[car], [dog, car]])
    assert [[each.label for each in row] for row in found] == [["car"], ["dog", "car"]]
    for image, each in ((pixels[0], found[0][0]), (pixels[1], found[1][0])):
        picture = Image.fromarray(image.permute(1, 2, 0).numpy())
        if each.mask is not None:
            grey = Image.new("RGB", picture.size, "#999")
            picture = Image.composite(picture, grey, Image.fromarray(each.mask.numpy()))
        # Pillow rounds edges as GenEval's crops do: 2.5 and 33.5 to 2 and 34.
        crop = picture.crop((each.left, each.top, each.right, each.bottom))
        size = (30, 15) if each.label == "car" else (28, 32)
        assert crop.size == size
        cropped = torch.frombuffer(bytearray(crop.tobytes()), dtype=torch.uint8)
        cropped = cropped.reshape(1, size[1], size[0], 3).permute(0, 3, 1, 2)
        embedding = embed_images(clip_folder, cropped)[0]
        logits = []
        for colour in COLOURS:
            captions = [
                f"a photo of a {colour} {each.label}",
                f"a photo of a {colour}-colored {each.label}",
                f"a photo of a {colour} object",
            ]
            mean = embed_captions(clip_folder, captions).mean(dim=0)
            logits.append(100 * embedding @ normalize(mean, dim=0))
        expected = torch.stack(logits).softmax(dim=0).tolist()
        assert tuple(each.colours) == COLOURS
        assert list(each.colours.values()) == pytest.approx(expected, abs=1e-4)
    # Both the class and the cut-out matter.
    assert found[0][0].colours != found[1][1].colours


def test_colours_that_are_known_are_not_judged(
    judge: ObjectColours, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Detection("car", 0.9, 0.0, 0.0, 9.0, 9.0, colours={"teal": 1.0})
    other = Detection("car", 0.8, 0.0, 0.0, 9.0, 9.0)
    ((first, second),) = judge.judge(noise(1), [[known, other]])
    assert first is known
    assert set(second.colours) == set(COLOURS)

    def fail(*arguments: object) -> None:
        raise AssertionError("CLIP was asked")

    (tower,) = judge.modules()
    monkeypatch.setattr(tower, "forward", fail)
    monkeypatch.setattr(tower.visual, "forward", fail)
    assert judge.judge(noise(2), [[known], []]) == [[known], []]


def test_an_object_is_cut_out_on_grey_and_cropped_to_its_box() -> None:
    image = torch.arange(48, dtype=torch.uint8).reshape(3, 4, 4)
    mask = torch.eye(4, dtype=torch.bool)
    box = {"label": "car", "score": 1.0, "left": 1.0, "top": 0.0, "right": 3.0, "bottom": 2.0}
    cut = cut_out(image, Detection(**box, mask=mask))
    assert cut[0].tolist() == [[153, 153], [5, 153]]
    assert cut_out(image, Detection(**box))[0].tolist() == [[1, 2], [5, 6]]


@pytest.mark.parametrize(
    ("left", "right", "columns"), [(1.2, 1.4, [1]), (3.9, 4.0, [3]), (4.0, 4.0, [3])]
)
def test_a_sliver_is_cropped_to_one_pixel(left: float, right: float, columns: list[int]) -> None:
    image = torch.arange(4, dtype=torch.uint8).expand(3, 4, 4)
    found = Detection("car", 1.0, left, 0.0, right, 4.0)
    assert cut_out(image, found)[0].tolist() == [columns] * 4


def test_object_colours_check_their_files_before_they_are_loaded(clip_folder: Path) -> None:
    check_object_colours(options(clip_folder), kind="composition")
    wrong = options(clip_folder, clip_weights="none.pt")
    with pytest.raises(RewardError, match=r"^composition\.clip_weights .*no such file"):
        check_object_colours(wrong, kind="composition")
    with pytest.raises(RewardError, match=r"^composition\.clip_weights .*none\.pt"):
        ObjectColours(wrong, CPU, kind="composition")
    with pytest.raises(RewardError, match=r"^composition\.clip_model 'ViT-XXL' is not"):
        ObjectColours(options(clip_folder, clip_model="ViT-XXL"), CPU, kind="composition")


def test_object_colours_say_how_large_their_network_is(
    judge: ObjectColours, clip_folder: Path
) -> None:
    (network,) = judge.modules()
    tensors = [*network.parameters(), *network.buffers()]
    size = sum(each.numel() * each.element_size() for each in tensors)
    assert object_colours_bytes(options(clip_folder)) == size
