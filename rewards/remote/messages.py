"""Messages between a run and a scorer in another process (docs/remote_rewards.md).

Messages are JSON, with pictures as lossless PNG in base64. Nothing is ever unpickled.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Annotated, Final, Literal, TypeVar

import torch
from jaxtyping import UInt8
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from torch import Tensor

from rewards.base import Need
from rewards.pictures import decode_png, encode_png
from rewards.types import Prompt, Scores

PROTOCOL: Final = 1
"""Version of the format; messages of other versions are not understood."""

_LONGEST_QUOTED = 200
"""Characters of a message quoted in an error."""

_FLOAT32_MAX = torch.finfo(torch.float32).max

_Message = TypeVar("_Message", bound=BaseModel)


class MessageError(ValueError):
    """A message does not have the format; says what was found and what was expected."""


class _Answer(BaseModel):
    """Message from a scorer; unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class ScorerInfo(_Answer):
    """A scorer's description of itself.

    Attributes:
        protocol: Version of the format.
        name: Name of the scorer, for errors and people.
        needs: Parts of a prompt that it uses.
    """

    protocol: Literal[1]
    name: str = Field(min_length=1)
    needs: tuple[Need, ...]


class _Scores(_Answer):
    scores: tuple[Annotated[float, Field(ge=-_FLOAT32_MAX, le=_FLOAT32_MAX)], ...]
    notes: tuple[str, ...] = ()


class _Failure(_Answer):
    error: str = Field(min_length=1)


def _decode_picture(text: object) -> Tensor:
    if not isinstance(text, str):
        raise ValueError("must be a PNG in base64")
    return decode_png(base64.b64decode(text, validate=True))


_Picture = Annotated[Tensor, BeforeValidator(_decode_picture)]


class _Section(BaseModel):
    """Part of a request; an unknown key is a mistake, and must not be ignored."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", arbitrary_types_allowed=True
    )


class _SentPrompt(_Section):
    prompt_id: str
    prompt: str
    texts: tuple[str, ...] = ()
    target: _Picture | None = None
    sources: tuple[_Picture, ...] = ()


class _SentPicture(_Section):
    prompt: Annotated[int, Field(ge=0)]
    png: _Picture


class _Request(_Section):
    protocol: Literal[1]
    prompts: tuple[_SentPrompt, ...]
    pictures: Annotated[tuple[_SentPicture, ...], Field(min_length=1)]


def encode_info(info: ScorerInfo) -> bytes:
    """Encode a scorer's description as JSON."""
    return info.model_dump_json().encode()


def decode_info(body: bytes) -> ScorerInfo:
    """Read a scorer's description.

    Raises:
        MessageError: It is something else, or of another version.
    """
    return _parse(ScorerInfo, body)


def encode_request(
    prompts: Sequence[Prompt],
    pixels: UInt8[Tensor, "N 3 H W"],
    *,
    has_targets: bool,
    has_sources: bool = False,
) -> bytes:
    """Encode N pictures with their prompts; a repeated prompt is sent once.

    Args:
        prompts: One per picture.
        pixels: RGB, 0..255, on any device.
        has_targets: Whether to send the prompts' target images, too.
        has_sources: Whether to send their source pictures, too.
    """
    sent: list[dict[str, object]] = []
    places: dict[tuple[object, ...], int] = {}
    pictures = []
    for prompt, picture in zip(prompts, pixels.cpu(), strict=True):
        # Comparing tensors is expensive; two equal objects are sent twice, which is correct.
        key = (
            prompt.prompt_id,
            prompt.prompt,
            prompt.texts,
            id(prompt.target),
            *map(id, prompt.sources),
        )
        if key not in places:
            places[key] = len(sent)
            described = _describe_prompt(prompt, has_target=has_targets)
            if has_sources and prompt.sources:
                described["sources"] = [_encode_base64(source) for source in prompt.sources]
            sent.append(described)
        pictures.append({"prompt": places[key], "png": _encode_base64(picture)})
    return json.dumps({"protocol": PROTOCOL, "prompts": sent, "pictures": pictures}).encode()


def decode_request(body: bytes) -> tuple[list[Prompt], UInt8[Tensor, "N 3 H W"]]:
    """Read a request: one prompt per picture, and the pictures.

    Raises:
        MessageError: It is of another version, has unknown or missing keys, a picture that is not
            an 8-bit RGB PNG, pictures of several sizes, or a picture without a prompt.
    """
    request = _parse(_Request, body)
    prompts = [
        Prompt(
            prompt_id=sent.prompt_id,
            prompt=sent.prompt,
            texts=sent.texts,
            target=sent.target,
            sources=sent.sources,
        )
        for sent in request.prompts
    ]
    for number, each in enumerate(request.pictures):
        if each.prompt >= len(prompts):
            raise MessageError(
                f"pictures.{number}.prompt is {each.prompt}, but there are {len(prompts)} prompts; "
                "it must be the index of one, counted from 0"
            )
    if len({each.png.shape for each in request.pictures}) > 1:
        raise MessageError("images have different sizes; send one size per request")
    pixels = torch.stack([each.png for each in request.pictures])
    return [prompts[each.prompt] for each in request.pictures], pixels


def encode_scores(scores: Scores) -> bytes:
    """Encode finite scores and notes as JSON, with enough digits to restore each float32."""
    message: dict[str, object] = {"scores": scores.values.tolist()}
    if scores.notes:
        message["notes"] = scores.notes
    return json.dumps(message, allow_nan=False).encode()


def decode_scores(body: bytes, *, count: int) -> Scores:
    """Read the scores of `count` pictures, and the notes if there are any.

    Raises:
        MessageError: There is not one finite number, or not one note, for each picture.
    """
    answer = _parse(_Scores, body)
    if len(answer.scores) != count:
        raise MessageError(
            f"{len(answer.scores)} scores for {count} images; there must be one number per "
            "image, in the order of the images"
        )
    if len(answer.notes) not in (0, count):
        raise MessageError(
            f"{len(answer.notes)} notes for {count} images; there must be one text per image, "
            "in the order of the images, or no notes at all"
        )
    return Scores(torch.tensor(answer.scores, dtype=torch.float32), answer.notes)


def encode_failure(text: str) -> bytes:
    """Encode the reason of a failure as JSON."""
    return json.dumps({"error": text}).encode()


def decode_failure(body: bytes) -> str:
    """Read the reason of a failure.

    Raises:
        MessageError: The body contains none.
    """
    return _parse(_Failure, body).error


def _encode_base64(picture: UInt8[Tensor, "3 H W"]) -> str:
    return base64.b64encode(encode_png(picture)).decode("ascii")


def _describe_prompt(prompt: Prompt, *, has_target: bool) -> dict[str, object]:
    described: dict[str, object] = {
        "prompt_id": prompt.prompt_id,
        "prompt": prompt.prompt,
        "texts": prompt.texts,
    }
    if has_target and prompt.target is not None:
        described["target"] = _encode_base64(prompt.target)
    return described


def _parse(kind: type[_Message], body: bytes) -> _Message:
    try:
        return kind.model_validate_json(body.decode(errors="replace"))
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"])) or "the message"
        raise MessageError(
            f"{place} is {str(problem['input'])[:_LONGEST_QUOTED]!r}: {problem['msg']}"
        ) from error
