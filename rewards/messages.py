"""Messages between a run and a scorer in another process (docs/remote_rewards.md).

Messages are JSON, with images as lossless PNG in base64. Nothing is ever unpickled.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Literal

import torch
from jaxtyping import UInt8
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    model_serializer,
)
from torch import Tensor

from rewards.base import Need
from rewards.images import decode_png, encode_png
from rewards.types import Prompt

TOKEN_VARIABLE = "GLM_GRPO_REWARD_TOKEN"
"""Environment variable with a reward server's token, on its side and usually on the run's."""


def encode_base64(pixels: UInt8[Tensor, "3 H W"]) -> str:
    """Encode an image as PNG in base64."""
    return base64.b64encode(encode_png(pixels)).decode("ascii")


def _decode_base64(value: object) -> object:
    return decode_png(base64.b64decode(value, validate=True)) if isinstance(value, str) else value


_Pixels = Annotated[Tensor, BeforeValidator(_decode_base64), PlainSerializer(encode_base64)]


class _Request(BaseModel):
    """Part of a request; an unknown key is a mistake, and must not be ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class SentPrompt(_Request):
    """A prompt, with those of its images that the scorer needs."""

    prompt_id: str
    prompt: str
    texts: tuple[str, ...] = ()
    target: _Pixels | None = None
    sources: tuple[_Pixels, ...] = ()
    metadata: dict[str, Any] = Field(default_factory=dict)

    @model_serializer(mode="wrap")
    def _without_empty_metadata(self, dump: Callable[[Any], Any]) -> dict[str, Any]:
        """Leave metadata out that are empty, which servers of earlier versions do not know."""
        sent: dict[str, Any] = dump(self)
        if not self.metadata:
            del sent["metadata"]
        return sent


class SentImage(_Request):
    """An image, and the index of its prompt."""

    prompt: int = Field(ge=0)
    png: _Pixels


class ScoreRequest(_Request):
    """Images of one size, with their prompts."""

    protocol: Literal[1]
    prompts: tuple[SentPrompt, ...]
    # The protocol's word for images.
    pictures: tuple[SentImage, ...] = Field(min_length=1)

    def unpack(self) -> tuple[list[Prompt], UInt8[Tensor, "N 3 H W"]]:
        """One prompt per image, and the images."""
        prompts = [Prompt(**dict(sent)) for sent in self.prompts]
        pixels = torch.stack([image.png for image in self.pictures])
        return [prompts[image.prompt] for image in self.pictures], pixels


def make_request(
    prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"], needs: Collection[Need]
) -> ScoreRequest:
    """Pack N images with their prompts; a repeated prompt is sent once.

    Args:
        needs: Parts of a prompt that the scorer uses; other images are not sent.
    """
    # By identity, because comparing tensors is expensive; equal prompts may be sent twice.
    different = list({id(prompt): prompt for prompt in prompts}.values())
    places = {id(prompt): place for place, prompt in enumerate(different)}
    sent = tuple(
        SentPrompt(
            prompt_id=prompt.prompt_id,
            prompt=prompt.prompt,
            texts=prompt.texts,
            target=prompt.target if "target" in needs else None,
            sources=prompt.sources if "source" in needs else (),
            metadata=dict(prompt.metadata),
        )
        for prompt in different
    )
    images = tuple(
        SentImage(prompt=places[id(prompt)], png=image)
        for prompt, image in zip(prompts, pixels.cpu(), strict=True)
    )
    return ScoreRequest(protocol=1, prompts=sent, pictures=images)


class _Answer(BaseModel):
    """Message from a scorer; unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, strict=True)


class ScorerInfo(_Answer):
    """A scorer's description of itself.

    Attributes:
        name: Name for errors.
        needs: Parts of a prompt that it uses.
        digest: Another one for a scorer with other options or code; may be empty.
    """

    protocol: Literal[1]
    name: str
    needs: tuple[Need, ...]
    digest: str = ""


class ScoreAnswer(_Answer):
    """One number per image, null for one that the scorer refuses; and one note each, or none.

    Attributes:
        objects: Objects that were found in each image, in words; or none.
    """

    scores: tuple[float | None, ...]
    notes: tuple[str, ...] = ()
    objects: tuple[tuple[str, ...], ...] = ()


class Failure(_Answer):
    """Reason of a failure."""

    error: str
