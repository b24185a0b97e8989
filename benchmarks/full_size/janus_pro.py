"""Section: phases of a Janus-Pro step with random weights, each beside its floor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from transformers import JanusConfig, JanusForConditionalGeneration

from benchmarks.full_size.measuring import seconds_of
from benchmarks.full_size.models import made_on
from benchmarks.full_size.scale import CONFIGS, Bench, Rows, make_batch
from glm_grpo.config import Config, compose_config
from glm_grpo.data.prompts import part_of_batch
from glm_grpo.models.janus_pro.decoder import JanusProDecoder
from glm_grpo.models.janus_pro.family import build_policy
from glm_grpo.models.janus_pro.loading import JanusPro, image_side
from glm_grpo.models.janus_pro.planner import JanusProPlanner, read_sizes
from glm_grpo.models.janus_pro.policy import JanusProPolicy
from glm_grpo.models.janus_pro.prompt_inputs import PromptInputs
from glm_grpo.plan.floors import rollout_floor, update_flops
from glm_grpo.plan.memory import BatchShape
from glm_grpo.training.collate import join_rollouts
from glm_grpo.types import PromptBatch

_CONFIG = "janus_pro_1b_24gb"
_PROMPT_TOKENS = 40
"""Roughly the number of tokens of a caption with its template."""
_BEGIN, _PAD, _IMAGE = 1, 0, 2
"""Ids of the special tokens, to which random weights give no meaning."""


def janus_pro(bench: Bench) -> Rows:
    """Sample, decode and learn from 8 x 8 images, with guidance and without."""
    for scale in (5.0, 1.0):
        step = _Step(bench, scale)
        for phase in (step.rollout, step.decode, step.update):
            yield f"guidance {scale:g}, {phase.__name__}", phase
        del step


class _Step:
    """A policy with the config's adapters, and what it drew."""

    def __init__(self, bench: Bench, guidance_scale: float) -> None:
        bench.free()
        words = ["data.path=none", "data.eval_path=none", "trackers=[]"]
        config = compose_config(
            CONFIGS, _CONFIG, [*words, f"rollout.guidance_scale={guidance_scale}"]
        )
        is_full = bench.is_on_accelerator
        sizes = read_sizes(config.model.path) if is_full else _small_sizes()
        self._bench, self._config = bench, config
        with made_on(bench.device, torch.bfloat16 if is_full else torch.float32):
            model = JanusForConditionalGeneration(sizes).eval()
        self._policy = policy_on(model, config)
        self._decoder = JanusProDecoder(model.model.vqmodel)
        rollout = config.rollout
        prompts, group_size = rollout.prompts_per_step, rollout.group_size
        self._batch = make_batch(image_side(sizes), prompts=prompts, group_size=group_size)
        at_once = (rollout.batch_size or prompts * group_size) // group_size
        self._parts = [range(start, start + at_once) for start in range(0, prompts, at_once)]
        self._rollout = self._sample()
        self._planner = JanusProPlanner(sizes)
        self._shape = BatchShape(prompts, group_size, _PROMPT_TOKENS)

    def rollout(self) -> dict[str, Any]:
        """Sample all images, in parts."""
        floor = rollout_floor(self._planner, self._config, self._shape, self._bench.speed)
        return self._timed(self._sample, floor)

    def decode(self) -> dict[str, Any]:
        """Decode all images."""
        flops = self._planner.decode_flops(self._config) * self._shape.images
        work = partial(self._decoder.decode, self._batch, self._rollout.token_ids)
        return self._timed(work, flops / self._bench.speed.flops)

    def update(self) -> dict[str, Any]:
        """Replay all images, and compute their gradients."""
        flops = update_flops(self._planner, self._config.without_reference(), self._shape)
        return self._timed(self._learn, flops / self._bench.speed.flops)

    def _timed(self, work: Callable[[], object], floor: float) -> dict[str, Any]:
        first, seconds = (seconds_of(work, self._bench.device) for _ in range(2))
        return {
            "images": self._shape.images,
            "tokens": self._rollout.token_ids.shape[-1],
            "first_seconds": first,
            "seconds": seconds,
            "floor_seconds": floor,
            "ratio": seconds / floor,
            **self._bench.peak_bytes(),
        }

    def _sample(self) -> Any:
        rollouts = []
        for part in self._parts:
            batch = part_of_batch(self._batch, part)
            encode_ids(self._policy, batch)
            rollouts.append(self._policy.sample(batch))
        return join_rollouts(rollouts)

    def _learn(self) -> None:
        encode_ids(self._policy, self._batch)
        for rows in torch.arange(self._shape.images).split(self._config.train.micro_batch_size):
            replay = self._policy.replay(self._batch, self._rollout, rows)
            replay.log_probs.sum().backward()


def policy_on(model: JanusForConditionalGeneration, config: Config) -> JanusProPolicy:
    """A policy around a model of random weights, without a tokenizer; see `encode_ids`."""
    model.generation_config.bos_token_id = _BEGIN
    model.generation_config.pad_token_id = _PAD
    model.generation_config.generation_kwargs = {"boi_token_id": _IMAGE}
    parts = JanusPro(model, SimpleNamespace(tokenizer=None))
    return build_policy(config, parts)


def encode_ids(policy: JanusProPolicy, batch: PromptBatch) -> PromptInputs:
    """Give a batch prompts of random ids, all of one length."""
    shape = (len(batch.prompts), _PROMPT_TOKENS)
    ids = torch.randint(3, 100, shape, generator=torch.Generator().manual_seed(batch.seed))
    ids[:, 0], ids[:, -1] = _BEGIN, _IMAGE
    inputs = PromptInputs(ids, torch.ones_like(ids))
    policy._encoded = (batch, inputs)
    return inputs


def _small_sizes() -> JanusConfig:
    """16 tokens, for a dry run."""
    return JanusConfig.from_dict(
        {
            "text_config": {
                "model_type": "llama",
                "vocab_size": 128,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
            },
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 32,
                "patch_size": 8,
                "projection_dim": 64,
                "num_image_tokens": 16,
            },
            "vq_config": {
                "num_embeddings": 96,
                "latent_channels": 64,
                "base_channels": 64,
                "channel_multiplier": [1, 1, 1, 1],
                "projection_dim": 64,
                "image_token_embed_dim": 64,
            },
        }
    )
