"""What the models in the package know, by the name that `model.path` gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from glm_grpo.config import EMBEDDED_MODELS
from glm_grpo.tiny import edits, world
from glm_grpo.tiny.objects import world as objects_world


@dataclass(frozen=True)
class EmbeddedModel:
    """A miniature, which knows only prompts of its own world.

    Attributes:
        caption_form: Form of the prompts that it knows.
        example: One of them.
        is_caption: Whether a text is one.
        words: What the words in capitals of the form stand for, in lines.
        prompt_sets: Names of its text-to-image prompt sets, for training and held out.
    """

    caption_form: str
    example: str
    is_caption: Callable[[str], bool]
    words: tuple[str, ...]
    prompt_sets: tuple[str, str]

    def is_known(self, prompt: str, *, is_edit: bool) -> bool:
        """Whether the model was trained on prompts of this form."""
        return edits.is_instruction(prompt) if is_edit else self.is_caption(prompt)

    def known_form(self, *, is_edit: bool) -> str:
        """Describe the form that `is_known` accepts."""
        return edits.INSTRUCTION_FORM if is_edit else self.caption_form

    def example_prompt(self, *, is_edit: bool) -> str:
        """A prompt that the model knows."""
        return 'write instead "PARK"' if is_edit else self.example


SIGNS = EmbeddedModel(
    caption_form=world.CAPTION_FORM,
    example='white on green: a square above the word "PARK"',
    is_caption=world.is_caption,
    words=(
        f"COLOURS: {', '.join(world.COLOUR_NAMES)}",
        f"SHAPE: {', '.join(world.SHAPES)}; WORD: 3 or 4 capital letters",
    ),
    prompt_sets=("train", "heldout"),
)
OBJECTS = EmbeddedModel(
    caption_form=objects_world.CAPTION_FORM,
    example="a photo of two red circles",
    is_caption=objects_world.is_caption,
    words=(
        f"COLOUR: {', '.join(objects_world.COLOUR_NAMES)}",
        f"SHAPE: {', '.join(objects_world.SHAPES)}; lists have two to four, all different",
    ),
    prompt_sets=("objects-train", "objects-heldout"),
)
EMBEDDED: Mapping[str, EmbeddedModel] = dict(zip(EMBEDDED_MODELS, (SIGNS, OBJECTS), strict=True))
"""By `model.path`."""
