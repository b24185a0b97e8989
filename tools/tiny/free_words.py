"""Train the embedded model further on signs whose word and shape may stand anywhere.

python -m tools.tiny.free_words --work FOLDER

It starts from the shipped weights and writes FOLDER/pipeline, for `model.path`. The world of the
package has two layouts, in which credit by place needs no kinds of boxes (LOG.md, "Like with
like"); in this one they matter. Nothing of it is shipped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from diffusers import GlmImagePipeline
from jaxtyping import Bool, Float32, Int64
from torch import Tensor
from transformers import GlmImageForConditionalGeneration, GlmImageProcessor

from glm_grpo.models.glm_image.token_grid import generated_positions, token_layout
from glm_grpo.tiny import world
from tools.tiny.stage import Schedule, run_stages, train_stage
from tools.tiny.train_policy import processor_inputs
from tools.tiny.train_tokenizer import cell_tokens

SEED = 7
SHIPPED = Path(world.__file__).parent / "weights" / "pipeline"
LETTER_RATE = 0.25
OTHER_RATE = 0.15
_THREE_LETTERS = 0.4
"""Fraction of the words with four letters that lose the last one: they have two starts."""
_LAYOUT = token_layout(world.SIZE, world.SIZE)
_SIDE = 16
"""Side of the preview in tokens, four for each cell."""
_FIRST, _COPY = 3.0, 0.3
"""Weight of the first token of a cell, and of those that repeat it."""
_WHICH = 4
"""Further weight of which letter a cell shows, given that it shows one: where words stand is
chance, and drowns it."""


@dataclass(frozen=True)
class PlacedSign:
    """A sign, with the rows and columns in which its word and its shape begin."""

    sign: world.Sign
    word_at: tuple[int, int]
    shape_at: tuple[int, int]

    @property
    def cells(self) -> Int64[Tensor, "4 4"]:
        """Cell ids, row by row."""
        grid = torch.full((world.GRID, world.GRID), world.BLANK, dtype=torch.int64)
        row, start = self.word_at
        for column, letter in enumerate(self.sign.word, start):
            grid[row, column] = world.LETTERS.index(letter)
        top, left = self.shape_at
        first = len(world.LETTERS) + 4 * world.SHAPES.index(self.sign.shape)
        grid[top : top + 2, left : left + 2] = torch.arange(first, first + 4).view(2, 2)
        return grid + world.KINDS * self.sign.colours


def place(sign: world.Sign, rng: np.random.Generator) -> PlacedSign:
    """Put the word into any row, at any start, and the shape into two other rows."""
    row = int(rng.integers(world.GRID))
    start = int(rng.integers(world.GRID + 1 - len(sign.word)))
    tops = [top for top in range(world.GRID - 1) if row not in (top, top + 1)]
    shape_at = tops[rng.integers(len(tops))], int(rng.integers(world.GRID - 1))
    return PlacedSign(sign, (row, start), shape_at)


def random_placed_sign(rng: np.random.Generator) -> PlacedSign:
    """Make a sign with a random word that is not held out, anywhere."""
    sign = world.random_sign(rng)
    shorter = sign.word[:3]
    if rng.random() < _THREE_LETTERS and shorter not in world.HELD_OUT_WORDS:
        sign = replace(sign, word=shorter)
    return place(sign, rng)


@dataclass(frozen=True)
class Trainee:
    """The model, and the tokens of the world.

    Attributes:
        model: Trained in place.
        processor: Encodes the prompts.
        tokens_of_cells: Token of every cell.
        letter_tokens: Tokens of cells that show a letter.
    """

    model: GlmImageForConditionalGeneration
    processor: GlmImageProcessor
    tokens_of_cells: Int64[Tensor, " C"]
    letter_tokens: Int64[Tensor, " L"]

    def loss(
        self,
        rng: np.random.Generator,
        generator: torch.Generator,
        step: int,
        *,
        images: int,
        is_sparse: bool,
        is_careless: bool = False,
    ) -> Float32[Tensor, ""]:
        """Weighted nats per token of signs after captions, which may be careless.

        Args:
            rng: Draws the signs.
            generator: Not used.
            step: Not used.
            images: Number of signs.
            is_sparse: Whether only one row of tokens of each row of cells is kept in the preview.
            is_careless: Whether captions have mistakes.
        """
        rates = (LETTER_RATE, OTHER_RATE) if is_careless else (0.0, 0.0)
        describe = partial(world.confuse, rng=rng, letter_rate=rates[0], other_rate=rates[1])
        drawn, captions = [], []
        for _ in range(images):
            drawn.append(random_placed_sign(rng))
            captions.append(world.caption(describe(drawn[-1].sign)))
        cells = torch.stack([each.cells for each in drawn])
        end = torch.full((images, 1), self.model.config.image_end_token_id)
        generated = torch.cat([_tokens_in_order(self.tokens_of_cells[cells]), end], dim=1)
        is_letter = _tokens_in_order(cells % world.KINDS < len(world.LETTERS))
        is_letter = torch.cat([is_letter, torch.zeros_like(end, dtype=torch.bool)], dim=1)
        kept = torch.arange(generated.shape[1])
        if is_sparse:
            kept = kept[(kept >= _SIDE**2) | (kept // _SIDE % 4 == 0)]
        log_probs = self._log_probs(captions, generated, kept)
        nats = -log_probs.gather(2, generated[:, kept, None]).squeeze(2)
        which = (nats + log_probs[..., self.letter_tokens].logsumexp(dim=2)).clamp(min=0)
        weights = torch.where(_is_first(kept), _FIRST, _COPY)
        weighted = weights * (nats + _WHICH * which * is_letter[:, kept])
        return weighted.mean(0).sum() / weights.sum()

    def _log_probs(
        self, captions: list[str], generated: Int64[Tensor, "B T"], kept: Int64[Tensor, " K"]
    ) -> Float32[Tensor, "B K V"]:
        """Log-probabilities of the kept tokens after captions and earlier kept ones."""
        prompts = [processor_inputs(self.processor, caption) for caption in captions]
        lengths = torch.tensor([len(ids) for ids in prompts])
        longest = int(lengths.max())
        # Position k predicts token k + 1, whatever token is at k.
        before = kept[1:] - 1
        # Padding on the left.
        is_prompt = torch.arange(longest) >= longest - lengths[:, None]
        padding = self.model.config.text_config.pad_token_id
        inputs = torch.full((len(captions), longest), padding)
        inputs[is_prompt] = torch.cat(prompts)
        positions = (torch.arange(longest) - longest + lengths[:, None]).masked_fill(~is_prompt, 1)
        later = generated_positions(_LAYOUT, 0)[:, None] + lengths[None, :, None]
        seen = generated[:, before]
        hidden = self.model.model.language_model(
            input_ids=torch.cat([inputs, seen], dim=1),
            attention_mask=torch.cat([is_prompt.long(), torch.ones_like(seen)], dim=1),
            position_ids=torch.cat([positions.expand(3, -1, -1), later[:, :, before]], dim=2),
            use_cache=False,
        ).last_hidden_state
        return self.model.lm_head(hidden[:, longest - 1 :]).float().log_softmax(-1)


def _tokens_in_order(grid: Tensor) -> Tensor:
    """The enlarged preview of B grids of cells, then the grids: [B, 272]."""
    preview = grid.repeat_interleave(4, 1).repeat_interleave(4, 2)
    return torch.cat([preview.flatten(1), grid.flatten(1)], dim=1)


def _is_first(tokens: Int64[Tensor, " K"]) -> Bool[Tensor, " K"]:
    """Whether tokens are the first ones of a cell in the preview."""
    is_preview = tokens < _SIDE**2
    return is_preview & (tokens // _SIDE % 4 == 0) & (tokens % 4 == 0)


def _run(stage: str, work: Path) -> None:
    pipeline = GlmImagePipeline.from_pretrained(SHIPPED)
    model, processor = pipeline.vision_language_encoder, pipeline.processor
    tokens = cell_tokens(model, processor)
    letters = tokens.view(-1, world.KINDS)[:, : len(world.LETTERS)].unique()
    trainee = Trainee(model.train(), processor, tokens, letters)
    trained = (model.model.language_model, model.lm_head)
    model.requires_grad_(False)
    for module in trained:
        module.requires_grad_(True)
    stages = (
        ("sparse", partial(trainee.loss, images=32, is_sparse=True), Schedule(900, 1.5e-3)),
        ("full", partial(trainee.loss, images=24, is_sparse=False), Schedule(250, 1e-3)),
        (
            "careless",
            partial(trainee.loss, images=24, is_sparse=False, is_careless=True),
            Schedule(350, 1e-3, warmup_steps=20),
        ),
    )
    for name, loss, schedule in stages:
        train_stage(name, trained, loss, schedule=schedule, folder=work, seed=SEED)
    model.eval()
    pipeline.save_pretrained(work / stage)


if __name__ == "__main__":
    run_stages(("pipeline",), _run, description=__doc__.splitlines()[0])
