"""Seconds and memory of replay and update against a plain implementation of them.

python benchmarks/update.py [--repeats 3] [--side 1024] [--batch 4] [--json FILE]

A language model of hidden size 512 and 4 layers with the published head (16512 outputs) learns from
one rollout of full grids. Plain: logits of every output for all rows at once, `log_softmax`,
`gather`, a deep copy as the reference. Ours: `update_policy` on a `Policy`, row by row. Both run
in processes of their own, in turns; printed are the medians, their ratios, and how far loss and
gradient norm of the two differ.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from glm_grpo.glm_image.policy import Policy
from glm_grpo.glm_image.token_grid import generated_positions, token_layout
from glm_grpo.grpo.losses import LossSettings, grpo_loss
from glm_grpo.grpo.update import UpdateSettings, update_policy
from glm_grpo.tiny.models import PolicySizes, build_policy_model, build_processor
from glm_grpo.types import Advantages, Experience, ImageBatch, PromptBatch, Rollout
from rewards.types import Prompt, RewardTable

SIZES = PolicySizes(
    codebook=16384,
    reserved=128,
    hidden_size=512,
    intermediate_size=1408,
    heads=8,
    key_value_heads=2,
    rope_theta=10000.0,
    rope_section=(8, 12, 12),
)
LOSS = LossSettings(
    clip_low=0.2, clip_high=0.2, kl_coef=0.02, kl_estimator="k3", kl_behaviour_coef=0.0
)
UPDATE = UpdateSettings(
    clip_low=LOSS.clip_low,
    clip_high=LOSS.clip_high,
    kl_coef=LOSS.kl_coef,
    kl_behaviour_coef=LOSS.kl_behaviour_coef,
    kl_estimator=LOSS.kl_estimator,
    is_kl_in_reward=False,
    max_grad_norm=math.inf,
    micro_batch_size=1,
    updates_per_rollout=1,
)
MEGABYTE = 2**20


@dataclass(frozen=True)
class Outcome:
    """Of one update.

    Attributes:
        loss: Its value.
        grad_norm: L2 norm of the gradient.
    """

    loss: float
    grad_norm: float


class ConstantRate:
    """A schedule that leaves the learning rate alone."""

    def step(self) -> None:
        """Nothing to do."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--side", type=int, default=1024, help="pixels; T = 256 + (side / 32)^2")
    parser.add_argument("--batch", type=int, default=4, help="sequences")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=("plain", "ours"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        sys.stdout.write(json.dumps(_measure(options.child, options.side, options.batch)) + "\n")
        return
    runs: dict[str, list[dict[str, float]]] = {"plain": [], "ours": []}
    for _ in range(options.repeats):
        for child, measured in runs.items():
            measured.append(_run(child, options))
    medians = {
        child: {key: statistics.median(run[key] for run in measured) for key in measured[0]}
        for child, measured in runs.items()
    }
    plain, ours = medians["plain"], medians["ours"]
    report = {
        "tokens": token_layout(options.side, options.side).num_tokens,
        "batch": options.batch,
        "threads": torch.get_num_threads(),
        "medians": medians,
        "time_ratio": ours["seconds"] / plain["seconds"],
        "memory_ratio": ours["peak_megabytes"] / plain["peak_megabytes"],
        "loss_difference": abs(ours["loss"] - plain["loss"]),
        "grad_norm_relative": abs(ours["grad_norm"] / plain["grad_norm"] - 1),
        "runs": runs,
    }
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def _run(child: str, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", child]
    command += ["--side", str(options.side), "--batch", str(options.batch)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _measure(child: str, side: int, batch: int) -> dict[str, float]:
    """One update to warm up and one that is timed; peak memory above that of the models."""
    model = build_policy_model(seed=0, sizes=SIZES)
    # Neither takes part, and both would count as the model's.
    model.model.visual = model.model.vqmodel = None
    policy = Policy(
        SimpleNamespace(vision_language_encoder=model, processor=build_processor(SIZES)),
        temperature=1.0,
        adapter_rank=None,
        adapter_alpha=1.0,
        is_checkpointing=False,
        needs_reference=True,
        seed=0,
    )
    experience = _make_experience(side, batch)
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.0)
    policy.encode(experience.prompts)
    update: Callable[[], Outcome]
    if child == "ours":

        def update() -> Outcome:
            (report,) = update_policy(policy, optimizer, ConstantRate(), experience, UPDATE)
            return Outcome(report.total, report.grad_norm)
    else:

        def update() -> Outcome:
            return _plain_update(policy, optimizer, experience)

    before = _resident_bytes()
    update()
    begun = time.perf_counter()
    outcome = update()
    seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "seconds": seconds,
        "peak_megabytes": (peak - before) / MEGABYTE,
        "loss": outcome.loss,
        "grad_norm": outcome.grad_norm,
    }


def _plain_update(
    policy: Policy, optimizer: torch.optim.Optimizer, experience: Experience
) -> Outcome:
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        reference = _plain_log_probs(policy, experience, *policy.reference_modules())
    log_probs = _plain_log_probs(policy, experience, *policy.modules())
    loss = grpo_loss(
        log_probs,
        experience.rollout.log_probs.flatten(0, 1),
        reference,
        experience.advantages.values.flatten(),
        LOSS,
    )
    loss.total.backward()
    norm = nn.utils.clip_grad_norm_(policy.trainable_parameters(), math.inf)
    optimizer.step()
    return Outcome(loss.total.item(), float(norm))


def _plain_log_probs(
    policy: Policy, experience: Experience, language_model: Any, head: nn.Module
) -> Tensor:
    batch = experience.prompts
    token_ids = experience.rollout.token_ids.flatten(0, 1)
    inputs = policy.encode(batch).rows(torch.zeros(len(token_ids), dtype=torch.int64))
    layout = token_layout(batch.height, batch.width)
    later = generated_positions(layout, 0).unsqueeze(1) + inputs.next_position.view(1, -1, 1)
    hidden = language_model(
        input_ids=torch.cat([inputs.input_ids, token_ids[:, :-1]], dim=1),
        attention_mask=nn.functional.pad(
            inputs.attention_mask, (0, token_ids.shape[1] - 1), value=1
        ),
        position_ids=torch.cat([inputs.position_ids, later[..., :-1]], dim=2),
        use_cache=False,
    ).last_hidden_state[:, -layout.num_tokens :]
    # Over the codebook, as ours, so that losses can be compared; 128 outputs of 16512 are cut.
    every = head(hidden)[..., : SIZES.codebook].log_softmax(dim=-1)
    chosen: Tensor = every.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return chosen


def _make_experience(side: int, batch: int) -> Experience:
    generator = torch.Generator().manual_seed(0)
    tokens = token_layout(side, side).num_tokens
    prompt = Prompt("sign", 'white on green: a triangle above the word "OPEN"')
    shape = (1, batch, tokens)
    level = -math.log(SIZES.codebook)
    totals = torch.randn(1, batch, generator=generator)
    return Experience(
        prompts=PromptBatch((prompt,), batch, side, side, seed=0, decode_seeds=(0,)),
        rollout=Rollout(
            token_ids=torch.randint(SIZES.codebook, shape, generator=generator),
            log_probs=level + 0.1 * torch.randn(shape, generator=generator),
            is_kept=None,
            policy_step=0,
        ),
        images=ImageBatch(torch.zeros(1, batch, 3, 1, 1, dtype=torch.uint8), (0,)),
        rewards=RewardTable(
            ("none",),
            torch.zeros(1, batch, 1),
            torch.ones(1, 1, dtype=torch.bool),
            torch.ones(1),
            torch.ones(1),
        ),
        totals=totals,
        penalties=torch.zeros_like(totals),
        advantages=Advantages(totals - totals.mean(), torch.zeros(1, dtype=torch.bool)),
    )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
