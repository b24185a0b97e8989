"""Stage `policy`: train the language model to map captions to tokens.

The first part is blind: most earlier tokens of the image are hidden, so that every token, rather
than one in sixteen, must be found in the caption, and the model learns early to copy letters
(LOG.md). Next, it trains as it will be used, with true captions. Then it trains with careless
captions, like those in web data, which leaves the intended imperfection for GRPO to remove.
Finally, it trains on careless edits of signs, mixed with text-to-image.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor
from torch.nn import functional
from transformers import GlmImageForConditionalGeneration, GlmImageProcessor

from glm_grpo.models.glm_image.prompt_inputs import encode_prompts
from glm_grpo.models.glm_image.token_grid import generated_positions, token_layout
from glm_grpo.tiny import edits, world
from tools.tiny.stage import Schedule, train_stage

_BATCH = 24
_EDIT_BATCH = 32
_EDIT_CYCLE = 3
_BLIND_TOKENS = 112
"""Generated tokens kept in a blind step, drawn at random from 272, for shorter sequences."""
_LAYOUT = token_layout(world.SIZE, world.SIZE)


def train_policy(
    model: GlmImageForConditionalGeneration,
    processor: GlmImageProcessor,
    tokens_of_cells: Int64[Tensor, " C"],
    *,
    blind_steps: int,
    clean_steps: int,
    careless_steps: int,
    letter_rate: float,
    other_rate: float,
    edit_steps: int,
    edit_letter_rate: float,
    edit_rate: float,
    folder: Path,
    seed: int,
) -> None:
    """Train the language model and the head of `model` in place.

    Args:
        model: Model with a trained tokenizer.
        processor: Encodes the prompts.
        tokens_of_cells: Token of every cell.
        blind_steps: Steps in which most earlier tokens of the image are hidden.
        clean_steps: Steps of 24 images with true captions.
        careless_steps: Further steps with careless captions.
        letter_rate: Probability that a letter of a careless caption is random.
        other_rate: Probability that its shape, its colours, or its position is random.
        edit_steps: Further steps, two in three with 32 careless edits.
        edit_letter_rate: Probability that a letter of a new word is random.
        edit_rate: Probability that another edit goes wrong.
        seed: Seed of the whole pre-training.
    """
    model.requires_grad_(False)
    model.model.language_model.requires_grad_(True)
    model.lm_head.requires_grad_(True)

    def blind_loss(
        rng: np.random.Generator, generator: torch.Generator, step: int
    ) -> Float32[Tensor, ""]:
        signs = [world.random_sign(rng) for _ in range(_BATCH)]
        return caption_loss(model, processor, tokens_of_cells, signs, signs, blind=rng)

    def clean_loss(
        rng: np.random.Generator, generator: torch.Generator, step: int
    ) -> Float32[Tensor, ""]:
        signs = [world.random_sign(rng) for _ in range(_BATCH)]
        return caption_loss(model, processor, tokens_of_cells, signs, signs)

    def careless_loss(
        rng: np.random.Generator, generator: torch.Generator, step: int
    ) -> Float32[Tensor, ""]:
        signs = [world.random_sign(rng) for _ in range(_BATCH)]
        described = [
            world.confuse(sign, rng, letter_rate=letter_rate, other_rate=other_rate)
            for sign in signs
        ]
        return caption_loss(model, processor, tokens_of_cells, signs, described)

    def edit_step_loss(
        rng: np.random.Generator, generator: torch.Generator, step: int
    ) -> Float32[Tensor, ""]:
        # Without interleaved text-to-image, the model would forget it.
        if step % _EDIT_CYCLE == 0:
            return careless_loss(rng, generator, step)
        asked = [edits.random_edit(rng) for _ in range(_EDIT_BATCH)]
        rates = {"letter_rate": edit_letter_rate, "rate": edit_rate}
        made = [edits.careless(edit, rng, **rates) for edit in asked]
        return edit_loss(model, processor, tokens_of_cells, asked, made)

    trained = (model.model.language_model, model.lm_head)
    train_stage(
        "policy-blind",
        trained,
        blind_loss,
        schedule=Schedule(steps=blind_steps, learning_rate=2e-3),
        folder=folder,
        seed=seed,
    )
    train_stage(
        "policy-clean",
        trained,
        clean_loss,
        schedule=Schedule(steps=clean_steps, learning_rate=1e-3),
        folder=folder,
        seed=seed,
    )
    train_stage(
        "policy-careless",
        trained,
        careless_loss,
        schedule=Schedule(steps=careless_steps, learning_rate=1e-3, warmup_steps=20),
        folder=folder,
        seed=seed,
    )
    train_stage(
        "policy-edit",
        trained,
        edit_step_loss,
        schedule=Schedule(steps=edit_steps, learning_rate=1e-3, warmup_steps=20),
        folder=folder,
        seed=seed,
    )


def edit_loss(
    model: GlmImageForConditionalGeneration,
    processor: GlmImageProcessor,
    tokens_of_cells: Int64[Tensor, " C"],
    asked: list[edits.Edit],
    made: list[world.Sign],
) -> Float32[Tensor, ""]:
    """Nats per token of images after a source and an instruction.

    Args:
        model: Model to score with.
        processor: Encodes the prompts.
        tokens_of_cells: Token of every cell.
        asked: B edits, as shown and described to the model.
        made: B signs, the results of the edits.
    """
    sources = torch.stack([world.sign_cells(edit.before) for edit in asked])
    grids = tokens_of_cells[torch.stack([world.sign_cells(sign) for sign in made])]
    end = torch.full((len(made), 1), model.config.image_end_token_id)
    generated = torch.cat([grids.flatten(1), end], dim=1)
    inputs = encode_prompts(
        model,
        processor,
        [edits.instruction(edit) for edit in asked],
        height=world.SIZE,
        width=world.SIZE,
        source_token_ids=tokens_of_cells[sources].flatten(1).unsqueeze(1),
    )
    layout = token_layout(world.SIZE, world.SIZE, has_preview=False)
    later = generated_positions(layout, 0).unsqueeze(1) + inputs.next_position.view(1, -1, 1)
    seen = generated[:, :-1]
    hidden = model.model.language_model(
        input_ids=torch.cat([inputs.input_ids, seen], dim=1),
        attention_mask=torch.cat([inputs.attention_mask, torch.ones_like(seen)], dim=1),
        position_ids=torch.cat([inputs.position_ids, later], dim=2),
        use_cache=False,
    ).last_hidden_state
    logits = model.lm_head(hidden[:, inputs.input_ids.shape[1] - 1 :])
    return functional.cross_entropy(logits.flatten(0, 1), generated.flatten())


def caption_loss(
    model: GlmImageForConditionalGeneration,
    processor: GlmImageProcessor,
    tokens_of_cells: Int64[Tensor, " C"],
    drawn: list[world.Sign],
    described: list[world.Sign],
    *,
    blind: np.random.Generator | None = None,
) -> Float32[Tensor, ""]:
    """Nats per token of the images of `drawn` after the captions of `described`.

    Args:
        model: Model to score with.
        processor: Encodes the prompts.
        tokens_of_cells: Token of every cell.
        drawn: B signs to show.
        described: B signs to describe.
        blind: Draws which tokens are kept, and which of those are hidden from later ones; None:
            keep all and hide none.
    """
    grids = tokens_of_cells[torch.stack([world.sign_cells(sign) for sign in drawn])]
    # The preview is the target grid enlarged (nearest) to 16 x 16.
    preview = grids.repeat_interleave(4, 1).repeat_interleave(4, 2).flatten(1)
    end = torch.full((len(drawn), 1), model.config.image_end_token_id)
    generated = torch.cat([preview, grids.flatten(1), end], dim=1)

    prompts = [processor_inputs(processor, world.caption(sign)) for sign in described]
    longest = max(len(ids) for ids in prompts)
    inputs = torch.full((len(drawn), longest), model.config.text_config.pad_token_id)
    mask = torch.zeros(len(drawn), longest + generated.shape[1] - 1, dtype=torch.int64)
    positions = torch.ones(3, len(drawn), longest, dtype=torch.int64)
    offsets = torch.zeros(len(drawn), dtype=torch.int64)
    for row, ids in enumerate(prompts):
        inputs[row, longest - len(ids) :] = ids
        mask[row, longest - len(ids) :] = 1
        positions[:, row, longest - len(ids) :] = torch.arange(len(ids))
        offsets[row] = len(ids)
    later = generated_positions(_LAYOUT, 0).unsqueeze(1) + offsets.view(1, -1, 1)
    seen = generated[:, :-1]
    kept = torch.arange(seen.shape[1])
    if blind is not None:
        # Position k predicts token k + 1, whatever token is at k.
        kept = torch.from_numpy(np.sort(blind.permutation(len(kept))[:_BLIND_TOKENS]))
        rates = torch.from_numpy(blind.uniform(0.5, 1.2, size=(len(drawn), 1)))
        is_hidden = torch.from_numpy(blind.random(seen.shape)) < rates
        seen = seen.masked_fill(is_hidden, model.config.text_config.pad_token_id)
    hidden = model.model.language_model(
        input_ids=torch.cat([inputs, seen[:, kept]], dim=1),
        attention_mask=mask[:, : longest + len(kept)],
        position_ids=torch.cat([positions, later[:, :, kept]], dim=2),
        use_cache=False,
    ).last_hidden_state
    logits = model.lm_head(hidden[:, longest - 1 :])
    wanted = generated[:, torch.cat([torch.zeros(1, dtype=torch.int64), kept + 1])]
    return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def processor_inputs(processor: GlmImageProcessor, prompt: str) -> Int64[Tensor, " L"]:
    """Token ids of a prompt, including grid sizes and image start."""
    messages = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    inputs = processor.apply_chat_template(
        [messages],
        tokenize=True,
        return_dict=True,
        processor_kwargs={
            "target_h": world.SIZE,
            "target_w": world.SIZE,
            "return_tensors": "pt",
        },
    )
    return inputs["input_ids"][0]
