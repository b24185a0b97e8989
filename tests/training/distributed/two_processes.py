"""What each of two processes finds of the other, learns through the engine, and is refused.

Started twice by the fixture `found`: two_processes.py FOLDER, which gets RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from torch import nn

from glm_grpo.config.losses import ClippedLoss
from glm_grpo.config.sections import TrainSection
from glm_grpo.data.prompts import part_of_batch
from glm_grpo.errors import ConfigError, GlmGrpoError, MemoryLimitError
from glm_grpo.grpo.learning_rate import LearningRate
from glm_grpo.grpo.policy import Replay
from glm_grpo.grpo.strategy import Strategy
from glm_grpo.grpo.update import Learner, update_policy
from glm_grpo.training.distributed.processes import Failure, Processes, current_processes
from glm_grpo.training.distributed.strategy import AccelerateStrategy, has_shards, make_accelerator
from glm_grpo.types import Experience, ImageBatch, PromptBatch, Rollout
from rewards.types import Prompt, RewardTable

PROMPTS, GROUP, TOKENS, CODEBOOK = 3, 2, 4, 5
ADVANTAGES = torch.tensor([[1.0, -1.5], [0.5, -0.25], [2.0, -1.75]])

LOSS = ClippedLoss(
    clip_low=0.05,
    clip_high=0.05,
    kl_coef=0.3,
    kl_estimator="k3",
    kl_placement="loss",
    kl_behaviour_coef=0.2,
)
TRAIN = TrainSection(
    steps=1,
    seed=0,
    epochs_per_rollout=3,
    micro_batch_size=PROMPTS * GROUP,
    checkpoint_every=1,
    keep_checkpoints=1,
    eval_every=1,
)

SHARDS = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
REFUSED = {
    "accumulation": {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
    "bf16 without shards": {"ACCELERATE_MIXED_PRECISION": "bf16"},
    "fp8": {"ACCELERATE_MIXED_PRECISION": "fp8"},
    "shards of the first kind": {**SHARDS, "FSDP_VERSION": "1"},
    "DeepSpeed": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
    "models loaded by one": {**SHARDS, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"},
}


class Table(nn.Module):
    """Token t is drawn from softmax(logits[t]), whatever the prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(table(0))

    def forward(self, token_ids):
        log_probs = self.logits.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return picked(log_probs, token_ids), entropy.detach().expand(len(token_ids), -1)


class TablePolicy:
    """As much of a policy as engine and update use."""

    dtype = torch.float32

    def __init__(self) -> None:
        self.network = Table()
        self.wrapped: nn.Module = self.network
        self.replayed: list[int] = []

    def wrap(self, wrapped):
        self.wrapped = wrapped

    def trainable_parameters(self):
        return [*self.network.parameters()]

    def replay(self, prompts, rollout, rows):
        self.replayed.append(len(rows))
        log_probs, entropy = self.wrapped(rollout.token_ids.flatten(0, 1)[rows])
        return Replay(log_probs, entropy=entropy, outside_codebook=torch.zeros_like(entropy))


def table(seed):
    return torch.randn(TOKENS, CODEBOOK, generator=torch.Generator().manual_seed(seed))


def picked(log_probs, token_ids):
    return log_probs.expand(len(token_ids), -1, -1).gather(2, token_ids[..., None]).squeeze(-1)


def make_experience(processes: Processes) -> Experience:
    """This process's part of one batch."""
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(CODEBOOK, (PROMPTS, GROUP, TOKENS), generator=generator)
    log_probs, reference = (
        picked(table(seed).log_softmax(-1), token_ids.flatten(0, 1)).view_as(token_ids)
        for seed in (0, 5)
    )
    prompts = tuple(Prompt(prompt_id=str(row), prompt="a sign") for row in range(PROMPTS))
    seeds = (0,) * PROMPTS
    batch = PromptBatch(prompts, GROUP, height=32, width=32, seed=0, decode_seeds=seeds)
    rows = processes.part(PROMPTS)
    own = slice(rows.start, rows.stop)
    pixels = torch.zeros(PROMPTS, GROUP, 3, 1, 1, dtype=torch.uint8)
    return Experience(
        prompts=part_of_batch(batch, rows),
        rollout=Rollout(token_ids[own], log_probs[own], sampling_mask=None),
        images=ImageBatch(pixels[own], seeds[own]),
        scores=RewardTable(
            names=("only",),
            raw=ADVANTAGES[own, :, None],
            is_applicable=torch.ones(len(rows), 1, dtype=torch.bool),
            weights=torch.ones(1),
            std_floors=torch.ones(1),
        ),
        totals=ADVANTAGES[own],
        penalties=torch.zeros(len(rows), GROUP),
        advantages=ADVANTAGES[own][..., None],
        reference_log_probs=reference[own],
    )


def learn(processes: Processes, accelerator, micro_batch_size: int) -> dict:
    """Three updates; what the policy is then, what was reported, and what was replayed here."""
    policy = TablePolicy()
    strategy = (
        Strategy() if processes.count == 1 else AccelerateStrategy(policy, accelerator, processes)
    )
    optimizer = torch.optim.SGD(policy.network.parameters(), lr=0.5)
    train = TRAIN.model_copy(update={"micro_batch_size": micro_batch_size})
    rate = LearningRate(optimizer, peak=0.5, schedule="constant", warmup_updates=0, total_updates=1)
    learner = Learner(policy, optimizer, rate, strategy, max_grad_norm=0.25)
    reports = update_policy(learner, make_experience(processes), LOSS, train)
    return {
        "logits": policy.network.logits.tolist(),
        "reports": [dict(report.metrics) for report in reports],
        "replayed": policy.replayed,
    }


def refusals() -> dict:
    """What is said of launches that this trainer does not run on."""
    told = {}
    for name, settings in REFUSED.items():
        AcceleratorState._reset_state()
        os.environ.update(settings)
        try:
            make_accelerator()
        except ConfigError as error:
            told[name] = str(error)
        for variable in settings:
            del os.environ[variable]
    AcceleratorState._reset_state()
    return told


def mixed() -> dict:
    """How shards are computed with in bf16."""
    settings = {**SHARDS, "ACCELERATE_MIXED_PRECISION": "bf16"}
    settings["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    os.environ.update(settings)
    accelerator = make_accelerator()
    policy = accelerator.state.fsdp_plugin.mixed_precision_policy
    return {
        "has shards": has_shards(accelerator),
        "types": [str(policy.param_dtype), str(policy.reduce_dtype), str(policy.output_dtype)],
    }


def caught(work):
    """What it raises, as class and text; else what it returns."""
    try:
        return ["returned", work()]
    except (ValueError, GlmGrpoError) as error:
        return [type(error).__name__, str(error)]


def fail_in(processes: Processes, *ranks: int):
    with processes.together():
        if processes.rank in ranks:
            raise ValueError(f"rank {processes.rank} stumbled")


def update(processes: Processes):
    """Joins gradients through the group of gradients."""
    with processes.watched():
        torch.distributed.all_reduce(torch.ones(1))


def fail_on_main(processes: Processes):
    def work():
        raise MemoryLimitError(f"rank {processes.rank} has no memory")

    processes.on_main(work)


def shown(failure: Failure | None) -> list | None:
    return failure and [failure.rank, failure.message, failure.aftermath.name]


def find(processes: Processes) -> dict:
    """How values and failures travel."""
    calls = []
    return {
        "gather": processes.gather(10 * processes.rank),
        "gather on main": processes.gather_on_main(10 * processes.rank),
        "any": [processes.any(processes.rank == 1), processes.any(False)],
        "on main": processes.on_main(lambda: calls.append(processes.rank) or "done"),
        "calls": calls,
        "alike": caught(lambda: fail_in(processes)),
        "failure of none": processes.failure,
        "one fails": caught(lambda: fail_in(processes, 1)),
        "failure": shown(processes.failure),
        # They still agree on what to do next, and on why.
        "after": processes.on_main(lambda: "saved"),
        "failure stays": shown(processes.failure),
        "both fail": caught(lambda: fail_in(processes, 0, 1)),
        "main fails": caught(lambda: fail_on_main(processes)),
        "last failure": shown(processes.failure),
    }


def find_gone(processes: Processes) -> dict:
    """What the first process notices once the second one is gone."""
    return {
        "other gone": caught(lambda: processes.gather(0)),
        "other gone in an update": caught(lambda: update(processes)),
        "other gone, and this one fails": caught(lambda: fail_in(processes, 0)),
    }


def main() -> None:
    accelerator = make_accelerator()
    processes = current_processes()
    found = {
        "alone": learn(Processes(), accelerator, PROMPTS * GROUP),
        "team": {size: learn(processes, accelerator, size) for size in (1, 3)},
        "refused": refusals(),
        "mixed": mixed(),
        **find(processes),
    }
    if processes.is_main:
        found |= find_gone(processes)
    Path(sys.argv[1], f"{processes.rank}.json").write_text(json.dumps(found))
    # Gone without a word: nothing of the group is closed.
    os._exit(0)


if __name__ == "__main__":
    main()
