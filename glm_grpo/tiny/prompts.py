"""The prompt sets of the synthetic world: `tiny:train` and `tiny:heldout`."""

from __future__ import annotations

from dataclasses import dataclass

from glm_grpo.errors import DataError
from glm_grpo.tiny import world
from rewards.types import Prompt

_SETS = {
    "train": (world.TRAINING_WORDS, 1),
    "heldout": (world.HELD_OUT_WORDS, 2),
}
"""Name -> words, and the seed their shapes, colours and places are drawn from."""


@dataclass(frozen=True)
class WorldPrompts:
    """Prompts of the world, drawn when asked for.

    Attributes:
        path: `tiny:train` or `tiny:heldout`.
        signs: One a prompt.
        height: Of the pictures, pixels.
        width: Of the pictures, pixels.
    """

    path: str
    signs: tuple[world.Sign, ...]
    height: int = world.SIZE
    width: int = world.SIZE

    def captions(self) -> list[str]:
        """What every prompt says, without drawing its picture."""
        return [world.caption(sign) for sign in self.signs]

    def __len__(self) -> int:
        return len(self.signs)

    def __getitem__(self, index: int) -> Prompt:
        sign = self.signs[index]
        return Prompt(
            prompt_id=sign.word.lower(),
            prompt=world.caption(sign),
            texts=(sign.word,),
            target=world.draw_sign(sign),
        )


def tiny_prompts(name: str, *, height: int, width: int, sources: int = 0) -> WorldPrompts:
    """One sign for each word, with its picture as the target.

    Raises:
        DataError: There is no such set, sources are asked for, or the world's pictures have another
            size.
    """
    if name not in _SETS:
        raise DataError(
            f"there is no prompt set 'tiny:{name}'; the sets are "
            f"{', '.join(f'tiny:{known}' for known in _SETS)}"
        )
    if sources > 0:
        raise DataError(
            f"the prompts of tiny:{name} have no source pictures, and data.sources is {sources}; "
            "set data.sources=0, or name a file of edits"
        )
    if (height, width) != (world.SIZE, world.SIZE):
        raise DataError(
            f"the prompts of the embedded world have pictures of {world.SIZE} x {world.SIZE} "
            f"pixels, not {height} x {width}; set rollout.height and rollout.width to {world.SIZE}"
        )
    words, seed = _SETS[name]
    return WorldPrompts(path=f"tiny:{name}", signs=tuple(world.signs_of_words(words, seed=seed)))
