"""What shards of a policy take in each of two processes, by torch's own CPU allocator.

Started by test_shards.py: shard_processes.py FOLDER, which gets RANK.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import GlmImagePipeline
from torch import Tensor
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile

from glm_grpo.config import compose_config
from glm_grpo.models.glm_image.network import TokenSequences
from glm_grpo.models.glm_image.policy import GlmImagePolicy
from glm_grpo.tiny.models import build_policy_model
from glm_grpo.training.distributed.processes import current_processes
from glm_grpo.training.distributed.strategy import AccelerateStrategy, make_accelerator

ROWS, READ, DRAWN = 4, 301, 272
"""Sequences; tokens that are read, 30 of a prompt and all but the last of a 128 x 128 grid."""


def allocated(work: Callable[[], object]) -> int:
    """Most bytes above those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    live = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def bytes_of(tensors: list[Tensor]) -> int:
    local = [tensor.to_local() for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def sequences() -> TokenSequences:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (ROWS, READ), generator=generator)
    drawn = torch.randint(0, 50, (ROWS, DRAWN), generator=generator)
    positions = torch.arange(READ).expand(3, ROWS, READ).contiguous()
    return TokenSequences(ids, torch.ones_like(ids), positions, drawn, None)


def measure(policy: GlmImagePolicy, strategy: AccelerateStrategy) -> dict:
    # Cut up again after a pass, as from a run's first rollout on.
    with strategy.full_parameters():
        pass
    weights = [*policy.trainable_parameters()]
    optimizer = AdamW(weights)
    # Only a module in training mode recomputes activations.
    policy.network.train()

    def learn():
        log_probs, *_ = strategy._wrapped(sequences())
        strategy.backward(log_probs.sum())

    learn()
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    with strategy.full_parameters():
        storages = [each.untyped_storage() for each in policy.trainable_parameters()]
        together = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
    # What the thread that gathers frees is not seen, and on a busy machine it frees more.
    backward = min(allocated(learn) for _ in range(3))
    return {
        "weights": bytes_of(weights),
        "gradients": bytes_of([weight.grad for weight in weights]),
        "moments": bytes_of([moment for moment in moments if moment.ndim > 0]),
        "put together": together,
        "backward": backward,
        "step": allocated(optimizer.step),
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    accelerator, processes = make_accelerator(), current_processes()
    model = build_policy_model(seed=0)
    pipeline = GlmImagePipeline(
        tokenizer=None,
        processor=None,
        text_encoder=None,
        vision_language_encoder=model,
        vae=None,
        transformer=None,
        scheduler=None,
    )
    overrides = ("model.adapter=null", "model.gradient_checkpointing=true", "loss.kl_coef=0")
    config = compose_config(None, "tiny", overrides)
    policy = GlmImagePolicy(config, pipeline)
    measured = measure(policy, AccelerateStrategy(policy, accelerator, processes))
    (folder / f"{processes.rank}.json").write_text(json.dumps(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
