"""What a user of the stock classes computes: the oracle for sampling, replay and decoding."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import GlmImagePipeline
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from glm_grpo.models.glm_image.policy import GlmImagePolicy
from glm_grpo.models.glm_image.token_grid import batch_layout, target_token_ids, upsample_token_ids
from glm_grpo.types import PromptBatch, Rollout


def stock_inputs(policy: GlmImagePolicy, batch: PromptBatch) -> Any:
    """Captions and source images, encoded by the processor."""
    messages = [
        [
            {
                "role": "user",
                "content": [
                    *({"type": "image", "image": to_pil_image(each)} for each in prompt.sources),
                    {"type": "text", "text": prompt.prompt},
                ],
            }
        ]
        for prompt in batch.prompts
    ]
    sizes = {"target_h": batch.height, "target_w": batch.width}
    return policy.processor.apply_chat_template(
        messages,
        tokenize=True,
        return_dict=True,
        processor_kwargs={**sizes, "padding": True, "return_tensors": "pt"},
    )


def stock_log_probs(policy: GlmImagePolicy, batch: PromptBatch, token_ids: Tensor) -> Tensor:
    """Log-probabilities of grids, one of each prompt, from `generate` made to draw them."""
    inputs = stock_inputs(policy, batch)
    length = inputs["input_ids"].shape[1]
    generated = policy.model.generate(
        **inputs,
        max_new_tokens=token_ids.shape[1],
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        prefix_allowed_tokens_fn=lambda row, ids: [int(token_ids[row, len(ids) - length])],
    )
    logits = torch.stack(generated.logits, dim=1)[..., : policy.codebook_size]
    return logits.float().log_softmax(-1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def stock_image(
    pipeline: GlmImagePipeline,
    batch: PromptBatch,
    rollout: Rollout,
    prompt: int,
    sample: int,
    *,
    guidance_scale: float,
    steps: int,
) -> Tensor:
    """One image of a rollout, drawn by the pipeline; values from 0 to 1."""
    asked, layout = batch.prompts[prompt], batch_layout(batch)
    tokens = target_token_ids(rollout.token_ids[prompt, sample][None], layout)
    of_sources: dict[str, Any] = {}
    if asked.sources:
        assert batch.source_token_ids is not None
        ids = [upsample_token_ids(each, layout) for each in batch.source_token_ids[prompt]]
        rows, columns = (2 * side for side in layout.target)
        of_sources = {
            "image": [[to_pil_image(each) for each in asked.sources]],
            "prior_token_image_ids": [torch.cat(ids)],
            "source_image_grid_thw": [torch.tensor([[1, rows, columns]] * len(ids))],
        }
    drawn: Tensor = pipeline(
        prompt=[asked.prompt],
        prior_token_ids=upsample_token_ids(tokens, layout),
        generator=torch.Generator().manual_seed(batch.decode_seeds[prompt]),
        height=batch.height,
        width=batch.width,
        num_inference_steps=steps,
        guidance_scale=guidance_scale,
        output_type="pt",
        **of_sources,
    ).images[0]
    return drawn
