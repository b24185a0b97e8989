"""Prompt sets of the synthetic worlds: signs to generate, signs to edit, and shapes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from glm_grpo.digests import digest
from glm_grpo.errors import DataError
from glm_grpo.tiny import edits, world
from glm_grpo.tiny.objects.prompts import OBJECT_SETS, ObjectPrompts, object_prompts
from rewards.types import Prompt

_SETS = {
    "train": (world.TRAINING_WORDS, 1),
    "heldout": (world.HELD_OUT_WORDS, 2),
    "edit-train": (world.TRAINING_WORDS, 3),
    "edit-heldout": (world.HELD_OUT_WORDS, 4),
}
"""Set name -> words, and the seed for their shapes, colours and positions."""


@dataclass(frozen=True)
class WorldPrompts:
    """Prompts of the world, whose images are drawn on access.

    Attributes:
        path: Name of the set, such as `tiny:train`.
        signs: Target signs, one per prompt.
        changes: Edits that lead to them; empty for text-to-image.
    """

    path: str
    signs: tuple[world.Sign, ...]
    changes: tuple[edits.Edit, ...] = ()
    height: int = world.SIZE
    width: int = world.SIZE

    def ids(self) -> list[str]:
        """Ids of all prompts."""
        words = [sign.word.lower() for sign in self.signs]
        if not self.changes:
            return words
        return [f"{edit.kind}-{word}" for edit, word in zip(self.changes, words, strict=True)]

    def origins(self) -> list[str]:
        """The set, for every prompt."""
        return [self.path] * len(self)

    def captions(self) -> list[str]:
        """Captions of all prompts, without drawing an image."""
        if self.changes:
            return [edits.instruction(edit) for edit in self.changes]
        return [world.caption(sign) for sign in self.signs]

    def texts(self) -> list[tuple[str, ...]]:
        """Word on every sign."""
        return [(sign.word,) for sign in self.signs]

    def metadata(self) -> list[Mapping[str, Any]]:
        """Nothing."""
        return [{}] * len(self)

    def identities(self) -> list[Hashable]:
        """Caption of every prompt, with the sign that it changes."""
        if self.changes:
            return [(edits.instruction(edit), edit.before) for edit in self.changes]
        return [*self.captions()]

    def digests(self) -> dict[str, str]:
        """Digest of what each prompt asks to draw, by its id."""
        asked = zip(self.signs, self.changes or (None,) * len(self), strict=True)
        digests = [digest(repr(each).encode()) for each in asked]
        return dict(zip(self.ids(), digests, strict=True))

    def has_targets(self) -> bool:
        """True: every sign can be drawn."""
        return True

    def __len__(self) -> int:
        return len(self.signs)

    def __getitem__(self, index: int) -> Prompt:
        sign = self.signs[index]
        describe: Callable[..., Prompt] = partial(
            Prompt, texts=self.texts()[index], target=world.draw_sign(sign)
        )
        prompt_id = self.ids()[index]
        if not self.changes:
            return describe(prompt_id=prompt_id, prompt=world.caption(sign))
        edit = self.changes[index]
        return describe(
            prompt_id=prompt_id,
            prompt=edits.instruction(edit),
            sources=(world.draw_sign(edit.before),),
        )


def embedded_prompts(
    name: str, *, height: int, width: int, sources: int = 0
) -> WorldPrompts | ObjectPrompts:
    """Read a prompt set of one of the two worlds; see `tiny_prompts` and `object_prompts`."""
    read = object_prompts if name in OBJECT_SETS else tiny_prompts
    return read(name, height=height, width=width, sources=sources)


def tiny_prompts(name: str, *, height: int, width: int, sources: int = 0) -> WorldPrompts:
    """One sign per word, with its image as the target; with one source, two edits per word.

    Args:
        name: Name of the set.
        sources: Number of source images per prompt that the run needs.
    """
    if name not in _SETS:
        raise DataError(
            f"there is no prompt set 'tiny:{name}'; the sets are "
            f"{', '.join(f'tiny:{known}' for known in (*_SETS, *OBJECT_SETS))}"
        )
    is_edit = name.startswith("edit-")
    if sources != int(is_edit):
        raise DataError(
            f"prompts of tiny:{name} have {'1 source image' if is_edit else 'no source images'}, "
            f"but data.sources is {sources}; set data.sources={int(is_edit)}"
        )
    if (height, width) != (world.SIZE, world.SIZE):
        raise DataError(
            f"the prompts of the embedded world have images of {world.SIZE} x {world.SIZE} "
            f"pixels, not {height} x {width}; set rollout.height and rollout.width to {world.SIZE}"
        )
    words, seed = _SETS[name]
    signs = tuple(world.signs_of_words(words, seed=seed))
    if not is_edit:
        return WorldPrompts(path=f"tiny:{name}", signs=signs)
    rng = np.random.default_rng(seed)
    changes = tuple(
        edits.edit_of(sign, edits.KINDS[(index + offset) % len(edits.KINDS)], rng)
        for index, sign in enumerate(signs)
        for offset in (0, 2)
    )
    after = tuple(edit.after for edit in changes)
    return WorldPrompts(path=f"tiny:{name}", signs=after, changes=changes)
