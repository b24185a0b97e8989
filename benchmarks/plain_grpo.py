"""Train with GRPO as in its pseudo-code: one image after the other, nothing shared or batched.

Written as a user would write it with transformers, diffusers and the libraries of the scorers. It
computes the same as `collect` and `update_policy` (`benchmarks.step` compares them).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diffusers import GlmImagePipeline
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor, nn
from transformers import GlmImageForConditionalGeneration

from benchmarks.scorers import one_by_one, plain_rewards
from glm_grpo.config import Config
from glm_grpo.config.losses import ClippedLoss
from glm_grpo.models.glm_image.prompt_inputs import encode_prompts
from glm_grpo.models.glm_image.token_grid import (
    generated_positions,
    target_token_ids,
    token_layout,
    upsample_token_ids,
)
from glm_grpo.types import PromptBatch
from rewards.types import Prompt


@dataclass(frozen=True)
class Sample:
    """A generated image.

    Attributes:
        prompt: Its prompt.
        old_log_probs: Log-probs of its tokens before the update.
    """

    prompt: Prompt
    token_ids: Int64[Tensor, " T"]
    old_log_probs: Float32[Tensor, " T"]


class PlainGrpo:
    """The plain trainer.

    Args:
        config: What to train and how: full fine-tuning, KL in the loss, one update per rollout.
        pipeline: Stock pipeline; its language model is trained, and copied as the reference.
    """

    def __init__(self, config: Config, pipeline: GlmImagePipeline) -> None:
        self._config = config
        self._pipeline = pipeline
        self._model: GlmImageForConditionalGeneration = pipeline.vision_language_encoder
        self._reference = copy.deepcopy(self._model).requires_grad_(False)
        self._codebook: int = self._model.config.vq_config.num_embeddings
        self._layout = token_layout(config.rollout.height, config.rollout.width)
        rewards = plain_rewards(config)
        self._score = one_by_one([*rewards.values()])
        weights = config.reward.weights()
        self._weights = torch.tensor([weights[name] for name in rewards])
        self._model.requires_grad_(False)
        for module in (self._model.model.language_model, self._model.lm_head):
            module.requires_grad_(True)
        self.parameters = [p for p in self._model.parameters() if p.requires_grad]
        optim = config.optim
        self._optimizer = torch.optim.AdamW(
            self.parameters,
            lr=optim.learning_rate,
            betas=optim.betas,
            eps=optim.epsilon,
            weight_decay=optim.weight_decay,
        )

    def step(self, batch: PromptBatch) -> None:
        """Sample, decode, score and learn."""
        samples: list[Sample] = []
        rewards: list[Tensor] = []
        for prompt, seed in zip(batch.prompts, batch.decode_seeds, strict=True):
            for _ in range(batch.group_size):
                token_ids = self._sample(prompt)
                image = self._draw(prompt, token_ids, seed)
                rewards.append(self._score([prompt], image) @ self._weights)
                with torch.no_grad():
                    old_log_probs = self.log_probs(self._model, prompt, token_ids)
                samples.append(Sample(prompt, token_ids, old_log_probs))
        totals = torch.cat(rewards).unflatten(0, (len(batch.prompts), -1))
        self.learn(samples, self.advantages(totals))

    def advantages(self, totals: Float32[Tensor, "P G"]) -> Float32[Tensor, "P G"]:
        """Rewards minus the mean of their group, divided by its standard deviation."""
        settings = self._config.advantage
        centred = totals - totals.mean(dim=1, keepdim=True)
        values = centred / totals.std(dim=1, keepdim=True).clamp(min=settings.std_floor)
        return values if settings.clip is None else values.clamp(-settings.clip, settings.clip)

    def learn(
        self, samples: Sequence[Sample], advantages: Float32[Tensor, "P G"]
    ) -> tuple[float, float]:
        """Run one update; returns the loss and the norm of its gradient."""
        self._optimizer.zero_grad()
        loss = 0.0
        for sample, advantage in zip(samples, advantages.flatten(), strict=True):
            part = self._loss(sample, advantage) / len(samples)
            part.backward()
            loss += part.item()
        limit = self._config.optim.max_grad_norm or float("inf")
        norm = nn.utils.clip_grad_norm_(self.parameters, limit)
        self._optimizer.step()
        return loss, float(norm)

    def _loss(self, sample: Sample, advantage: Float32[Tensor, ""]) -> Float32[Tensor, ""]:
        settings = self._config.loss
        if not isinstance(settings, ClippedLoss):
            raise TypeError(f"loss.kind = {settings.kind}: the plain loss is the clipped one")
        log_probs = self.log_probs(self._model, sample.prompt, sample.token_ids)
        with torch.no_grad():
            reference = self.log_probs(self._reference, sample.prompt, sample.token_ids)
        ratio = (log_probs - sample.old_log_probs).exp()
        clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
        surrogate = torch.minimum(ratio * advantage, clipped * advantage)
        difference = reference - log_probs
        kl = difference.exp() - difference - 1
        return (settings.kl_coef * kl - surrogate).mean()

    def log_probs(
        self, model: GlmImageForConditionalGeneration, prompt: Prompt, token_ids: Tensor
    ) -> Float32[Tensor, " T"]:
        """Run a full forward pass: the logits of all tokens, `log_softmax`, `gather`."""
        rollout = self._config.rollout
        inputs = encode_prompts(
            model,
            self._pipeline.processor,
            [prompt.prompt],
            height=rollout.height,
            width=rollout.width,
        )
        later = generated_positions(self._layout, int(inputs.next_position)).unsqueeze(1)
        row = token_ids.unsqueeze(0)
        hidden = model.model.language_model(
            input_ids=torch.cat([inputs.input_ids, row[:, :-1]], dim=1),
            position_ids=torch.cat([inputs.position_ids, later[..., :-1]], dim=2),
            use_cache=False,
        ).last_hidden_state[0, -len(token_ids) :]
        logits = model.lm_head(hidden)[:, : self._codebook]
        chosen: Tensor = logits.log_softmax(-1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
        return chosen

    @torch.no_grad()
    def _sample(self, prompt: Prompt) -> Int64[Tensor, " T"]:
        """Sample one image like `generate_prior_tokens`, which returns only half of the tokens."""
        rollout = self._config.rollout
        inputs = self._pipeline.processor.apply_chat_template(
            [[{"role": "user", "content": [{"type": "text", "text": prompt.prompt}]}]],
            tokenize=True,
            return_dict=True,
            processor_kwargs={
                "target_h": rollout.height,
                "target_w": rollout.width,
                "return_tensors": "pt",
            },
        )
        vocabulary: int = self._model.config.text_config.vision_vocab_size
        tokens: Tensor = self._model.generate(
            **inputs,
            max_new_tokens=self._layout.num_tokens,
            do_sample=True,
            # Without this an image can end early, and cannot be decoded.
            suppress_tokens=list(range(self._codebook, vocabulary)),
        )[0, inputs["input_ids"].shape[1] :]
        return tokens

    def _draw(self, prompt: Prompt, token_ids: Tensor, seed: int) -> UInt8[Tensor, "1 3 H W"]:
        config, layout = self._config, self._layout
        drawn: Tensor = self._pipeline(
            prompt=prompt.prompt,
            prior_token_ids=upsample_token_ids(target_token_ids(token_ids, layout), layout)[None],
            generator=torch.Generator().manual_seed(seed),
            height=config.rollout.height,
            width=config.rollout.width,
            num_inference_steps=config.decode.steps,
            guidance_scale=config.decode.guidance_scale,
            output_type="pt",
        ).images
        return (drawn * 255).round().to(torch.uint8)
