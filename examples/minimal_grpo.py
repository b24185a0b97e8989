"""GRPO for an AR-plus-diffusion image model: the whole algorithm in one file.

Trains the embedded model, a GLM-Image in miniature, on two CPU cores:

    python examples/minimal_grpo.py --steps 20

Each step

1. samples G token grids for each of P prompts, with the log-probability of every token;
2. decodes them with the frozen diffusion transformer and VAE;
3. scores the images and combines the scores of each into one weighted reward;
4. compares the rewards within each prompt's group, which gives one advantage per image;
5. makes one clipped, KL-regularised update of the policy.

`train.py` does the same and adds what a long run needs: YAML, run folder and gallery, evaluation,
checkpoints, several updates per rollout, offload, several processes, asynchronous collection. This
file leaves all of that out, and the learning-rate schedule, clipping of advantages, images that a
term refuses, and credit by place (`advantage.credit=image` turns it off in train.py).

Shapes: P prompts, G images per prompt, T tokens per image, R reward terms, N rows of a micro-batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from glm_grpo.config import Config, compose_config
from glm_grpo.models.adapted_policy import AdaptedPolicy
from glm_grpo.setup.prepared_run import prepare
from glm_grpo.training.batches import build_batch
from glm_grpo.types import PromptBatch, Rollout
from rewards.types import RewardTable

CONFIGS = Path(__file__).resolve().parents[1] / "configs"

CLIP = 0.2  # the probability ratio is clipped to [1 - CLIP, 1 + CLIP]
KL_COEF = 0.02  # weight of the KL to the base policy
STD_FLOOR = 0.02  # smallest divisor of a group's rewards; keeps tiny differences small
LEARNING_RATE = 2e-4
ROWS = 16  # token grids per forward and backward pass; affects memory, not the gradient


@dataclass(frozen=True)
class StepResult:
    """Mean reward, loss, KL and gradient norm of one step."""

    reward: float
    loss: float
    kl: float
    grad_norm: float


def total_rewards(table: RewardTable) -> Tensor:
    """Weighted sum [P G] of the terms that apply to each prompt.

    A term that does not apply, such as LPIPS without a target image, does not count as 0; its
    weight goes to the terms that apply.
    """
    weights = table.weights * table.is_applicable  # [P R]
    scores = torch.where(table.is_applicable[:, None], table.raw, 0.0)  # [P G R]
    scale = table.weights.abs().sum() / weights.abs().sum(dim=-1, keepdim=True)
    return (scores * weights[:, None]).sum(dim=-1) * scale


def group_advantages(rewards: Tensor) -> Tensor:
    """Rewards [P G], centred and scaled within each prompt's group."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / rewards.std(dim=1, keepdim=True).clamp(min=STD_FLOOR)


def grpo_loss(
    log_probs: Tensor, old_log_probs: Tensor, reference_log_probs: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate plus the KL to the reference, and that KL; means over [N T] tokens."""
    ratio = (log_probs - old_log_probs).exp()  # 1 in the first update after sampling
    weight = advantages[:, None]  # one advantage for all tokens of an image
    surrogate = torch.minimum(ratio * weight, ratio.clamp(1 - CLIP, 1 + CLIP) * weight)
    # k3 times the ratio: its gradient is unbiased in later updates of the same tokens too.
    difference = reference_log_probs - log_probs
    kl = (ratio * (difference.exp() - 1 - difference)).mean()
    return -surrogate.mean() + KL_COEF * kl, kl


def update(
    policy: AdaptedPolicy,
    optimizer: torch.optim.Optimizer,
    batch: PromptBatch,
    rollout: Rollout,
    advantages: Tensor,
) -> tuple[float, float, float]:
    """Update the policy once with all P * G grids; returns loss, KL and gradient norm."""
    old_log_probs, advantages = rollout.log_probs.flatten(0, 1), advantages.flatten()
    optimizer.zero_grad()
    loss_sum, kl_sum = 0.0, 0.0
    for rows in torch.arange(len(advantages)).split(ROWS):
        reference = policy.reference_log_probs(batch, rollout, rows)  # the policy before training
        replay = policy.replay(batch, rollout, rows)  # with gradient
        loss, kl = grpo_loss(replay.log_probs, old_log_probs[rows], reference, advantages[rows])
        fraction = len(rows) / len(advantages)
        (loss * fraction).backward()
        loss_sum, kl_sum = loss_sum + fraction * loss.item(), kl_sum + fraction * kl.item()
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.trainable_parameters(), 1.0)
    optimizer.step()
    return loss_sum, kl_sum, grad_norm.item()


def train(config: Config, *, steps: int, learning_rate: float = LEARNING_RATE) -> list[StepResult]:
    """Train for `steps` steps and print one line for each.

    Args:
        config: Models, prompts, reward terms, and the sizes P and G.
        steps: Rollouts, each with one update.
        learning_rate: Constant learning rate of AdamW.
    """
    prepared = prepare(config)
    models = prepared.load()
    policy, decoder, scorer = models.policy, models.decoder, models.scorer
    prompts = prepared.prompts.training
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=learning_rate, weight_decay=0)
    results = []
    for step in range(1, steps + 1):
        batch = build_batch(config, prompts, step)
        rollout = policy.sample(batch)
        images = decoder.decode(batch, rollout.token_ids)
        table = scorer.score(batch.prompts, images.pixels)
        rewards = total_rewards(table)
        advantages = group_advantages(rewards)
        loss, kl, grad_norm = update(policy, optimizer, batch, rollout, advantages)
        results.append(StepResult(rewards.mean().item(), loss, kl, grad_norm))
        print(f"step {step}/{steps}  reward {results[-1].reward:.3f}  kl {kl:.4f}", flush=True)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="GRPO on the embedded model, in one file")
    parser.add_argument("--steps", type=int, default=20, help="rollouts, about 10 s each")
    parser.add_argument("overrides", nargs="*", help="config keys, such as rollout.group_size=4")
    given = parser.parse_args(arguments)
    train(compose_config(CONFIGS, "tiny", given.overrides), steps=given.steps)


if __name__ == "__main__":
    main()
