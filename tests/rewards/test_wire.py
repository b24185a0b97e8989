from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from rewards import wire
from rewards.types import Prompt
from rewards.wire import ScorerInfo, WireError


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator).to(torch.uint8)


def base64_png(image: Image.Image) -> str:
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return base64.b64encode(stream.getvalue()).decode()


def png_of_16_bits() -> str:
    """One pixel, RGB, 16 bits a channel; Pillow cannot write this."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)
    pixel = b"\0" + struct.pack(">HHH", 1, 2, 3)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(pixel)), (b"IEND", b"")
    data = b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks)
    return base64.b64encode(data).decode()


PIXEL = base64_png(Image.new("RGB", (1, 1), (1, 2, 3)))
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
    prompts, received = wire.decode_request(
        wire.encode_request([sign, dog, sign], pixels, has_targets=True)
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
    body = wire.encode_request([dog, cat, dog, dog], noise(4, 3, 2, 2), has_targets=True)
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
    body = wire.encode_request([first, second], noise(2, 3, 2, 2), has_targets=True)
    prompts, _ = wire.decode_request(body)
    assert torch.equal(prompts[0].target, first.target)
    assert torch.equal(prompts[1].target, second.target)


def test_request_leaves_targets_out_where_no_one_looks_at_them() -> None:
    prompt = Prompt("a", "a", target=noise(3, 2, 2))
    body = wire.encode_request([prompt], noise(1, 3, 2, 2), has_targets=False)
    assert wire.decode_request(body)[0][0].target is None


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
        (request(pictures=picture_of("?" + PIXEL)), "pictures.0.png is no PNG in base64"),
        (request(pictures=picture_of("aGVsbG8=")), "pictures.0.png is no PNG .*cannot identify"),
        (request(pictures=picture_of(PIXEL[:60])), "pictures.0.png is no PNG in base64"),
        (request(pictures=picture_of(png_of_16_bits())), "mode RGB with 16 bits a channel"),
        (request(prompts=[DOG | {"target": "aGVsbG8="}]), "prompts.0.target is no PNG"),
    ],
)
def test_request_is_refused_with_the_place_of_the_fault(body: bytes, problem: str) -> None:
    with pytest.raises(WireError, match=problem):
        wire.decode_request(body)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1"])
def test_request_with_a_picture_of_another_mode_is_refused(mode: str) -> None:
    body = request(pictures=picture_of(base64_png(Image.new(mode, (1, 1)))))
    with pytest.raises(WireError, match=f"PNG of mode {mode} with .* must be RGB with 8"):
        wire.decode_request(body)


def test_request_with_pictures_of_several_sizes_is_refused() -> None:
    wide = base64_png(Image.new("RGB", (2, 1)))
    body = request(pictures=picture_of(PIXEL) + picture_of(wide))
    with pytest.raises(WireError, match=r"several sizes \(1 x 1, 2 x 1\)"):
        wire.decode_request(body)


def test_scores_arrive_as_the_same_float32() -> None:
    scores = torch.tensor([0.1, -1 / 3, 1e-40, 3.4e38, 0.0])
    assert torch.equal(wire.decode_scores(wire.encode_scores(scores), count=5), scores)


def test_scores_may_be_whole_numbers_beside_other_keys() -> None:
    scores = wire.decode_scores(b'{"scores": [1, 2.5], "seconds": 3}', count=2)
    assert scores.tolist() == [1.0, 2.5]


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
    with pytest.raises(WireError, match=problem):
        wire.decode_scores(f'{{"scores": {scores}}}'.encode(), count=2)


def test_scores_must_be_there() -> None:
    with pytest.raises(WireError, match="scores is .*Field required"):
        wire.decode_scores(b'{"score": [1]}', count=1)


def test_scores_that_are_not_finite_are_never_sent() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        wire.encode_scores(torch.tensor([float("nan")]))


def test_info_arrives_and_looks_as_documented() -> None:
    info = ScorerInfo(protocol=1, name="ocr", needs=("text", "target"))
    body = wire.encode_info(info)
    assert json.loads(body) == {"protocol": 1, "name": "ocr", "needs": ["text", "target"]}
    assert wire.decode_info(body) == info


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b'{"protocol": 2, "name": 5}', "speaks protocol 2, and this side 1"),
        (b'{"protocol": 1, "name": "ocr", "needs": ["sound"]}', "needs.0 is 'sound'"),
        (b'{"protocol": 1, "needs": []}', "name is .*Field required"),
    ],
)
def test_info_of_another_kind_is_refused(body: bytes, problem: str) -> None:
    with pytest.raises(WireError, match=problem):
        wire.decode_info(body)


def test_info_must_name_its_protocol() -> None:
    with pytest.raises(WireError, match="protocol is .*Field required"):
        wire.decode_info(b'{"name": "ocr", "needs": []}')


def test_failure_arrives_and_must_say_something() -> None:
    assert wire.decode_failure(wire.encode_failure('no "room"\n')) == 'no "room"\n'
    with pytest.raises(WireError, match="error is ''"):
        wire.decode_failure(b'{"error": ""}')


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (Prompt("a", "a"), {"prompt"}),
        (Prompt("a", "a", texts=("", " ")), {"prompt"}),
        (Prompt("a", "a", texts=("", "A")), {"prompt", "text"}),
        (Prompt("a", "a", target=noise(3, 2, 2)), {"prompt", "target"}),
    ],
)
def test_has_needs_asks_for_every_need(prompt: Prompt, expected: set[Any]) -> None:
    met = {need for need in ("prompt", "text", "target") if wire.has_needs(prompt, (need,))}
    assert met == expected
    assert wire.has_needs(prompt, ())
    assert not wire.has_needs(prompt, ("prompt", "text", "target"))
