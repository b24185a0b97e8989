"""Messages between a run and a scorer in another process (docs/remote_rewards.md).

Messages are JSON; pictures are PNG, which keeps every value, in base64. Nothing is ever unpickled.
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
"""Version of the format: what a peer of another version says cannot be understood."""

_LONGEST_QUOTED = 200
"""Characters of a message in an error."""

_FLOAT32_MAX = torch.finfo(torch.float32).max


class MessageError(ValueError):
    """A message that is not in the format; says what was found and what must be there."""


class _Answer(BaseModel):
    """What a scorer sends; keys that are not known here are passed over."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class ScorerInfo(_Answer):
    """What a scorer says of itself.

    Attributes:
        protocol: Version of the format.
        name: Of the scorer, for errors and people.
        needs: What of a prompt it uses.
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
    """Part of a request; a key that is not known is a mistake, and must not be passed over."""

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


_Message = TypeVar("_Message", bound=BaseModel)


def encode_info(info: ScorerInfo) -> bytes:
    """What a scorer says of itself, as JSON."""
    return info.model_dump_json().encode()


def decode_info(body: bytes) -> ScorerInfo:
    """Read what a scorer says of itself.

    Raises:
        MessageError: It is not that, or of another version.
    """
    return _parse(ScorerInfo, body)


def encode_request(
    prompts: Sequence[Prompt],
    pixels: UInt8[Tensor, "N 3 H W"],
    *,
    has_targets: bool,
    has_sources: bool = False,
) -> bytes:
    """N pictures with their prompts; a prompt that occurs often is sent once.

    Args:
        prompts: One per picture.
        pixels: RGB, 0..255, on any device.
        has_targets: Whether the prompts' target pictures are sent too.
        has_sources: Whether their source pictures are.
    """
    sent: list[dict[str, object]] = []
    places: dict[tuple[object, ...], int] = {}
    pictures = []
    for prompt, picture in zip(prompts, pixels.cpu(), strict=True):
        # Tensors have no cheap equality; two objects that are equal are sent twice, which is right.
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
        MessageError: It is of another version, has keys too many or too few, a picture that is no
            8-bit RGB PNG, pictures of several sizes, or a picture of no prompt.
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
                f"pictures.{number}.prompt is {each.prompt}, but there are {len(prompts)} "
                "prompts; it must be the place of one, counted from 0"
            )
    if len({each.png.shape for each in request.pictures}) > 1:
        raise MessageError("pictures are of several sizes; send one size a request")
    pixels = torch.stack([each.png for each in request.pictures])
    return [prompts[each.prompt] for each in request.pictures], pixels


def encode_scores(scores: Scores) -> bytes:
    """Finite scores as JSON, in as many digits as give the same float32 back; notes too."""
    message: dict[str, object] = {"scores": scores.values.tolist()}
    if scores.notes:
        message["notes"] = scores.notes
    return json.dumps(message, allow_nan=False).encode()


def decode_scores(body: bytes, *, count: int) -> Scores:
    """Read the scores of `count` pictures, and the notes where there are any.

    Raises:
        MessageError: Not one finite number for each picture, or not one note for each.
    """
    answer = _parse(_Scores, body)
    if len(answer.scores) != count:
        raise MessageError(
            f"{len(answer.scores)} scores for {count} pictures; there must be one number per "
            "picture, in the order of the pictures"
        )
    if len(answer.notes) not in (0, count):
        raise MessageError(
            f"{len(answer.notes)} notes for {count} pictures; there must be one text per picture, "
            "in the order of the pictures, or no notes at all"
        )
    return Scores(torch.tensor(answer.scores, dtype=torch.float32), answer.notes)


def encode_failure(text: str) -> bytes:
    """Why there is no answer, as JSON."""
    return json.dumps({"error": text}).encode()


def decode_failure(body: bytes) -> str:
    """Read why there is no answer.

    Raises:
        MessageError: The body does not say.
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
