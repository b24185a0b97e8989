"""A policy that is nothing but a table of logits, and what it draws."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from glm_grpo.grpo.learning_rate import LearningRate
from glm_grpo.grpo.policy import Replay
from glm_grpo.grpo.strategy import Strategy
from glm_grpo.grpo.update import Learner, UpdateReport, update_policy
from glm_grpo.types import Experience, ImageBatch, PromptBatch, Rollout
from rewards.types import Prompt, RewardTable
from tests.factories import UpdateSections, update_sections

PROMPTS, GROUP, TOKENS, CODEBOOK = 2, 3, 4, 5

SETTINGS = update_sections(micro_batch_size=PROMPTS * GROUP)

ADVANTAGES = torch.tensor([[1.0, -1.5, 0.5], [-0.25, 1.0, -0.75]])
FLAT = torch.zeros(PROMPTS, GROUP)


class TablePolicy:
    """Token t is drawn from softmax(logits[t]), whatever the prompt.

    Attributes:
        replayed: Rows that were replayed, in order.
    """

    dtype = torch.float32

    def __init__(self, logits: Tensor) -> None:
        self.logits = nn.Parameter(logits.clone())
        self.replayed: list[int] = []

    def table(self) -> Tensor:
        """The logits as a forward pass gives them."""
        return self.logits

    def replay(self, prompts: PromptBatch, rollout: Rollout, rows: Tensor) -> Replay:
        self.replayed += rows.tolist()
        logits = self.table()
        all_log_probs = logits.log_softmax(-1)
        entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
        return Replay(
            log_probs=score(logits, rollout.token_ids).flatten(0, 1)[rows],
            entropy=entropy.detach().expand(len(rows), -1),
            # Distinguishes rows, so that a report on some of them differs from one on all.
            outside_codebook=(0.01 * rows.float())[:, None].expand(-1, len(logits)),
        )

    def trainable_parameters(self) -> Sequence[nn.Parameter]:
        return [self.logits]


def make_learner(
    policy: TablePolicy,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy | None = None,
    *,
    max_grad_norm: float = math.inf,
) -> Learner:
    """A policy that is learned at the optimizer's rate."""
    peak = optimizer.param_groups[0]["lr"]
    rate = LearningRate(
        optimizer, peak=peak, schedule="constant", warmup_updates=0, total_updates=1
    )
    return Learner(policy, optimizer, rate, strategy or Strategy(), max_grad_norm)


def score(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probabilities of tokens."""
    every = logits.log_softmax(-1).expand(*token_ids.shape, -1)
    return every.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def make_logits(seed: int = 0) -> Tensor:
    return torch.randn(TOKENS, CODEBOOK, generator=torch.Generator().manual_seed(seed))


def make_experience(
    sampled_by: Tensor, advantages: Tensor, *, reference: Tensor | None = None
) -> Experience:
    """Tokens with their log-probs under one table of logits, and under another if it is given."""
    num_prompts, group_size = advantages.shape
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(CODEBOOK, (num_prompts, group_size, TOKENS), generator=generator)
    prompts = tuple(Prompt(prompt_id=str(row), prompt="a sign") for row in range(num_prompts))
    seeds = (0,) * num_prompts
    return Experience(
        prompts=PromptBatch(prompts, group_size, height=32, width=32, seed=0, decode_seeds=seeds),
        rollout=Rollout(token_ids, score(sampled_by, token_ids), None),
        images=ImageBatch(torch.zeros(num_prompts, group_size, 3, 1, 1, dtype=torch.uint8), seeds),
        scores=RewardTable(
            names=("only",),
            raw=advantages[..., None],
            is_applicable=torch.ones(num_prompts, 1, dtype=torch.bool),
            weights=torch.ones(1),
            std_floors=torch.ones(1),
        ),
        totals=advantages,
        penalties=torch.zeros_like(advantages),
        advantages=advantages[..., None],
        reference_log_probs=None if reference is None else score(reference, token_ids),
    )


def learn(
    policy: TablePolicy,
    experience: Experience,
    settings: UpdateSections,
    learning_rate: float = 0.1,
    max_grad_norm: float = math.inf,
) -> list[UpdateReport]:
    """Plain gradient descent."""
    optimizer = torch.optim.SGD([policy.logits], lr=learning_rate)
    learner = make_learner(policy, optimizer, max_grad_norm=max_grad_norm)
    return update_policy(learner, experience, *settings)
