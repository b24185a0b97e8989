"""Measure how far replayed log-probs are from sampled ones, and which part of the model causes it.

python -m benchmarks.replay_gap FOLDER [--dtypes bfloat16 float16 float32] [--guidance 5]
    [--group 2]

FOLDER is a Janus-Pro, such as one that `benchmarks.janus_folder` writes. Each line shows
|replayed - sampled| in nats per token: of the policy, and with the generation head computed in
float32 on the same hidden states, which leaves what the layers cause.
"""

from __future__ import annotations

import argparse
import gc
import resource
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from glm_grpo.config import compose_config
from glm_grpo.models.base import DTYPES
from glm_grpo.models.janus_pro.loading import image_side, load_pipeline
from glm_grpo.models.janus_pro.network import JanusNetwork
from glm_grpo.models.janus_pro.policy import JanusProPolicy
from glm_grpo.types import PromptBatch
from rewards.types import Prompt


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--guidance", type=float, default=5.0)
    parser.add_argument("--group", type=int, default=2)
    options = parser.parse_args(arguments)
    for dtype in options.dtypes:
        measure(options.folder, dtype, guidance=options.guidance, group_size=options.group)
        gc.collect()


def measure(folder: str, dtype: str, *, guidance: float, group_size: int) -> None:
    """Print the gaps of one dtype."""
    parts = load_pipeline(folder, dtype=DTYPES[dtype])
    prompts = ("data.path=none", "data.eval_path=none")
    model = (f"model.dtype={dtype}", "model.adapter=null", f"rollout.guidance_scale={guidance}")
    config = compose_config(None, "janus_pro_1b_24gb", [*prompts, *model])
    policy = JanusProPolicy(config.without_reference(), parts)
    side = image_side(parts.model.config)
    batch = PromptBatch(
        (Prompt("0", "a red cat"),), group_size, side, side, seed=11, decode_seeds=(5,)
    )
    states = _States(policy.network)
    rollout = policy.sample(batch)
    sampled = torch.stack(states.seen, dim=1)
    states.seen.clear()
    with torch.no_grad():
        replayed = policy.replay(batch, rollout, torch.arange(group_size)).log_probs
    gap = (replayed - rollout.log_probs[0]).abs()
    _show(f"{dtype}, guidance {guidance:g}", gap, replayed - rollout.log_probs[0])
    tokens = rollout.token_ids[0]
    for name, is_float in (("last map in float32", False), ("head in float32", True)):
        first, second = (
            _log_probs(policy.network, hidden, tokens, is_float=is_float)
            for hidden in (sampled, states.seen[0])
        )
        _show(f"{dtype}, {name}", (second - first).abs(), second - first)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{dtype}, peak {peak / 1e9:.1f} GB", flush=True)


def _show(name: str, gap: Tensor, signed: Tensor) -> None:
    ratios = signed.exp()
    outside = ((ratios < 0.8) | (ratios > 1.2)).float().mean()
    print(
        f"{name}: mean {gap.mean():.4f}, largest {gap.max():.3f}, ratios outside .8 to 1.2 "
        f"{outside:.1%}, mean ratio {ratios.mean():.4f}",
        flush=True,
    )


class _States:
    """Hidden states from which a network computes its logits."""

    def __init__(self, network: JanusNetwork) -> None:
        self.seen: list[Tensor] = []
        guide = network._guide

        def keep(hidden_states: Tensor) -> Tensor:
            self.seen.append(hidden_states)
            return guide(hidden_states)

        network._guide = keep  # type: ignore[method-assign]


@torch.no_grad()
def _log_probs(network: Any, hidden: Tensor, tokens: Tensor, *, is_float: bool) -> Tensor:
    head = network.generation_head
    if is_float:
        before = head.proj_out
        states = torch.nn.functional.linear(
            hidden.float(), before.weight.float(), before.bias.float()
        )
        states = head.activation_fn(states)
    else:
        states = head.activation_fn(head.proj_out(hidden)).float()
    if network.is_guided:
        conditional, unconditional = states.chunk(2)
        states = unconditional + network.guidance_scale * (conditional - unconditional)
    last = head.vision_head
    logits = torch.nn.functional.linear(states, last.weight.float(), last.bias.float())
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


if __name__ == "__main__":
    main()
