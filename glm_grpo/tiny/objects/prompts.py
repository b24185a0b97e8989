"""Prompt sets of the world of shapes, in GenEval's form."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from glm_grpo.digests import digest
from glm_grpo.errors import DataError
from glm_grpo.tiny.objects import world
from rewards.types import Prompt

OBJECT_SETS = {"objects-train": (False, 32), "objects-heldout": (True, 12)}
"""Set name -> whether its captions are held out, and the most prompts of each kind."""


@dataclass(frozen=True)
class ObjectPrompts:
    """Prompts of the world, whose images are drawn on access.

    Attributes:
        path: Name of the set, such as `tiny:objects-train`.
        requests: What each prompt asks for.
    """

    path: str
    requests: tuple[world.Request, ...]
    height: int = world.SIZE
    width: int = world.SIZE

    def ids(self) -> list[str]:
        """Ids of all prompts."""
        return [_identify(caption) for caption in self.captions()]

    def origins(self) -> list[str]:
        """The set, for every prompt."""
        return [self.path] * len(self)

    def captions(self) -> list[str]:
        """Captions of all prompts."""
        return [world.caption(request) for request in self.requests]

    def texts(self) -> list[tuple[str, ...]]:
        """No texts."""
        return [()] * len(self)

    def metadata(self) -> list[Mapping[str, Any]]:
        """What each prompt asks for, in GenEval's form."""
        return [world.metadata(request) for request in self.requests]

    def identities(self) -> list[Hashable]:
        """Caption of every prompt."""
        return [*self.captions()]

    def digests(self) -> dict[str, str]:
        """Digest of what each prompt asks to draw, by its id."""
        digests = [digest(repr(request).encode()) for request in self.requests]
        return dict(zip(self.ids(), digests, strict=True))

    def has_targets(self) -> bool:
        """True: there is one of the many right images of every prompt."""
        return True

    def __len__(self) -> int:
        return len(self.requests)

    def __getitem__(self, index: int) -> Prompt:
        request = self.requests[index]
        caption = world.caption(request)
        rng = np.random.default_rng(zlib.crc32(caption.encode()))
        cells = world.scene_cells(world.arrange(request, rng))
        return Prompt(
            prompt_id=_identify(caption),
            prompt=caption,
            target=world.draw_cells(cells),
            metadata=world.metadata(request),
        )


def object_prompts(name: str, *, height: int, width: int, sources: int = 0) -> ObjectPrompts:
    """Read a prompt set of the world: as many prompts of each kind, so far as there are.

    Args:
        name: One of `OBJECT_SETS`.
        sources: Number of source images per prompt that the run needs.
    """
    if sources:
        raise DataError(
            f"prompts of tiny:{name} have no source images, but data.sources is {sources}; set "
            "data.sources=0"
        )
    if (height, width) != (world.SIZE, world.SIZE):
        raise DataError(
            f"the prompts of the embedded world have images of {world.SIZE} x {world.SIZE} "
            f"pixels, not {height} x {width}; set rollout.height and rollout.width to {world.SIZE}"
        )
    held_out, most = OBJECT_SETS[name]
    rng = np.random.default_rng(int(held_out))
    chosen = [
        requests[index]
        for requests in world.requests_by_tag(held_out=held_out).values()
        for index in sorted(rng.permutation(len(requests))[:most])
    ]
    return ObjectPrompts(path=f"tiny:{name}", requests=tuple(chosen))


def _identify(caption: str) -> str:
    return caption.removeprefix("a photo of ").replace(",", "").replace(" ", "-")
