from __future__ import annotations

import base64
import io
import json
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from rewards.remote import messages
from rewards.remote.messages import MessageError, ScorerInfo
from rewards.types import Prompt, Scores


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator).to(torch.uint8)


def base64_png(image: Image.Image) -> str:
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return base64.b64encode(stream.getvalue()).decode()


PIXEL = base64_png(Image.new("RGB", (1, 1), (1, 2, 3)))
GREY = base64_png(Image.new("L", (1, 1)))
DOG = {"prompt_id": "dog", "prompt": "a dog"}


def request(**changes: object) -> bytes:
    """A request for one picture, with changes."""
    message = {"protocol": 1, "prompts": [DOG], "pictures": [{"prompt": 0, "png": PIXEL}]}
    return json.dumps(message | changes).encode()


def picture_of(png: str) -> list[dict[str, Any]]:
    return [{"prompt": 0, "png": png}]


def test_request_brings_prompts_and_pictures_to_the_other_side_without_loss() -> None:
    dog = Prompt("dog", "a dog")
    sign = Prompt("sign", 'says "Ünï"', texts=("Ünï", "24 h"), target=noise(3, 5, 7, seed=1))
    pixels = noise(3, 3, 5, 7)
    prompts, received = messages.decode_request(
        messages.encode_request([sign, dog, sign], pixels, has_targets=True)
    )
    assert torch.equal(received, pixels)
    assert [(each.prompt_id, each.prompt, each.texts) for each in prompts] == [
        ("sign", 'says "Ünï"', ("Ünï", "24 h")),
        ("dog", "a dog", ()),
        ("sign", 'says "Ünï"', ("Ünï", "24 h")),
    ]
    assert torch.equal(prompts[2].target, sign.target)
    assert prompts[1].target is None


def test_request_sends_a_prompt_once_and_looks_as_documented() -> None:
    dog, cat = Prompt("dog", "a dog"), Prompt("cat", "a cat", texts=("MEOW",))
    body = messages.encode_request([dog, cat, dog, dog], noise(4, 3, 2, 2), has_targets=True)
    message = json.loads(body)
    assert message.keys() == {"protocol", "prompts", "pictures"}
    assert message["protocol"] == 1
    assert message["prompts"] == [
        {"prompt_id": "dog", "prompt": "a dog", "texts": []},
        {"prompt_id": "cat", "prompt": "a cat", "texts": ["MEOW"]},
    ]
    assert [picture["prompt"] for picture in message["pictures"]] == [0, 1, 0, 0]
    assert all(picture.keys() == {"prompt", "png"} for picture in message["pictures"])


def test_request_keeps_prompts_apart_that_differ_in_their_target_alone() -> None:
    first, second = (Prompt("a", "a", target=noise(3, 2, 2, seed=seed)) for seed in (1, 2))
    body = messages.encode_request([first, second], noise(2, 3, 2, 2), has_targets=True)
    prompts, _ = messages.decode_request(body)
    assert torch.equal(prompts[0].target, first.target)
    assert torch.equal(prompts[1].target, second.target)


def test_request_leaves_targets_out_where_no_one_looks_at_them() -> None:
    prompt = Prompt("a", "a", target=noise(3, 2, 2))
    body = messages.encode_request([prompt], noise(1, 3, 2, 2), has_targets=False)
    assert messages.decode_request(body)[0][0].target is None


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"<html>", "the message is '<html>': Invalid JSON"),
        (request(protocol=2), "speaks protocol 2, and this side 1; run the same version"),
        (request(scale=1), "scale is '1': Extra inputs are not permitted"),
        (request(prompts=[DOG | {"traget": None}]), "prompts.0.traget is 'None': Extra"),
        (request(pictures=[]), "pictures is .* at least 1 item"),
        (request(pictures=[{"prompt": 1, "png": PIXEL}]), r"pictures.0.prompt is 1, but .* 1 prom"),
        (request(pictures=[{"prompt": -1, "png": PIXEL}]), "pictures.0.prompt is '-1'"),
        (request(pictures=picture_of("?" + PIXEL)), "pictures.0.png is no .*Only base64 data"),
        (
            request(pictures=picture_of("aGVsbG8=")),
            "pictures.0.png cannot be used .no PNG file.*; give a whole PNG file",
        ),
        (
            request(pictures=picture_of(GREY)),
            r"pictures.0.png cannot be used .of mode L .*, not RGB with 8 bits.; give",
        ),
        (request(prompts=[DOG | {"target": "aGVsbG8="}]), "prompts.0.target cannot be used"),
        (b"[" * 2**20 + b",", "has more than 1048576 items; send fewer pictures"),
    ],
)
def test_request_is_refused_with_the_place_of_the_fault(body: bytes, problem: str) -> None:
    with pytest.raises(MessageError, match=problem):
        messages.decode_request(body)


def test_request_with_pictures_of_several_sizes_is_refused() -> None:
    wide = base64_png(Image.new("RGB", (2, 1)))
    body = request(pictures=picture_of(PIXEL) + picture_of(wide))
    with pytest.raises(MessageError, match=r"several sizes \(1 x 1, 2 x 1\)"):
        messages.decode_request(body)


def test_scores_arrive_as_the_same_float32() -> None:
    scores = torch.tensor([0.1, -1 / 3, 1e-40, 3.4e38, 0.0])
    received = messages.decode_scores(messages.encode_scores(Scores(scores)), count=5)
    assert torch.equal(received.values, scores)


def test_scores_may_be_whole_numbers_beside_other_keys() -> None:
    scores = messages.decode_scores(b'{"scores": [1, 2.5], "seconds": 3}', count=2)
    assert scores.values.tolist() == [1.0, 2.5]


def test_notes_arrive_as_they_were_and_look_as_documented() -> None:
    scores = Scores(torch.tensor([0.5, 0.25]), ('says "Ünï"\n☂', ""))
    body = messages.encode_scores(scores)
    assert json.loads(body) == {"scores": [0.5, 0.25], "notes": ['says "Ünï"\n☂', ""]}
    assert messages.decode_scores(body, count=2).notes == scores.notes


def test_notes_are_left_out_where_there_are_none() -> None:
    body = messages.encode_scores(Scores(torch.tensor([0.5])))
    assert json.loads(body) == {"scores": [0.5]}
    assert messages.decode_scores(body, count=1).notes == ()
    assert messages.decode_scores(b'{"scores": [1], "notes": []}', count=1).notes == ()


@pytest.mark.parametrize(
    ("notes", "problem"),
    [
        ('["a"]', "1 notes for 2 pictures; there must be one text per picture"),
        ('["a", "b", "c"]', "3 notes for 2 pictures"),
        ('["a", null]', "notes.1 is 'None': Input should be a valid string"),
        ('["a", 5]', "notes.1 is '5'"),
        ('"ab"', "notes is 'ab'"),
        ("null", "notes is 'None'"),
    ],
)
def test_notes_that_are_not_one_text_per_picture_are_refused(notes: str, problem: str) -> None:
    with pytest.raises(MessageError, match=problem):
        messages.decode_scores(f'{{"scores": [0, 1], "notes": {notes}}}'.encode(), count=2)


@pytest.mark.parametrize(
    ("scores", "problem"),
    [
        ("[0.5, NaN]", "scores.1 is 'nan': Input should be a finite number"),
        ("[0.5, -Infinity]", "scores.1 is '-inf'"),
        ("[0.5, 1e39]", "scores.1 is '1e.39'"),
        ('[0.5, "0.5"]', "scores.1 is '0.5': Input should be a valid number"),
        ("[0.5, true]", "scores.1 is 'True'"),
        ("[0.5, null]", "scores.1 is 'None'"),
        ("0.5", "scores is '0.5'"),
        ("[0.5]", "1 scores for 2 pictures; there must be one number per picture"),
        ("[0.5, 0.5, 0.5]", "3 scores for 2 pictures"),
    ],
)
def test_scores_that_are_none_are_refused(scores: str, problem: str) -> None:
    with pytest.raises(MessageError, match=problem):
        messages.decode_scores(f'{{"scores": {scores}}}'.encode(), count=2)


def test_scores_must_be_there() -> None:
    with pytest.raises(MessageError, match="scores is .*Field required"):
        messages.decode_scores(b'{"score": [1]}', count=1)


def test_scores_that_are_not_finite_are_never_sent() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        messages.encode_scores(Scores(torch.tensor([float("nan")])))


def test_info_arrives_and_looks_as_documented() -> None:
    info = ScorerInfo(protocol=1, name="ocr", needs=("text", "target"))
    body = messages.encode_info(info)
    assert json.loads(body) == {"protocol": 1, "name": "ocr", "needs": ["text", "target"]}
    assert messages.decode_info(body) == info


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b'{"protocol": 2, "name": 5}', "speaks protocol 2, and this side 1"),
        (b'{"protocol": 1, "name": "ocr", "needs": ["sound"]}', "needs.0 is 'sound'"),
        (b'{"protocol": 1, "needs": []}', "name is .*Field required"),
    ],
)
def test_info_of_another_kind_is_refused(body: bytes, problem: str) -> None:
    with pytest.raises(MessageError, match=problem):
        messages.decode_info(body)


def test_info_must_name_its_protocol() -> None:
    with pytest.raises(MessageError, match="protocol is .*Field required"):
        messages.decode_info(b'{"name": "ocr", "needs": []}')


def test_failure_arrives_and_must_say_something() -> None:
    assert messages.decode_failure(messages.encode_failure('no "room"\n')) == 'no "room"\n'
    with pytest.raises(MessageError, match="error is ''"):
        messages.decode_failure(b'{"error": ""}')
