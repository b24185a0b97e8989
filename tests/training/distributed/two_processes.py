"""What each of two processes finds of the other, learns through the engine, and is refused.

Started twice by the fixture `found`: two_processes.py FOLDER, which gets RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from torch import nn

from glm_grpo.data.prompts import part_of_batch
from glm_grpo.errors import ConfigError, GlmGrpoError, MemoryLimitError
from glm_grpo.grpo.strategy import Strategy
from glm_grpo.grpo.update import update_policy
from glm_grpo.training.distributed.processes import Failure, Processes, current_processes
from glm_grpo.training.distributed.strategy import AccelerateStrategy, has_shards, make_accelerator
from glm_grpo.types import Experience, Rollout
from tests.factories import changed, update_sections
from tests.grpo.table_policy import TablePolicy, make_experience, make_learner, make_logits

ADVANTAGES = torch.tensor([[1.0, -1.5], [0.5, -0.25], [2.0, -1.75]])

SETTINGS = update_sections(
    epochs_per_rollout=3, clip_low=0.05, clip_high=0.05, kl_coef=0.3, kl_behaviour_coef=0.2
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
    """What the engine wraps."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self):
        return self.logits


class TeamPolicy(TablePolicy):
    """Computes through the wrapped network; `sizes` are those of its micro-batches."""

    def __init__(self):
        super().__init__(make_logits())
        self.network = self.wrapped = Table(self.logits)
        self.sizes: list[int] = []

    def wrap(self, wrapped):
        self.wrapped = wrapped

    def table(self):
        return self.wrapped()

    def replay(self, prompts, rollout, rows):
        self.sizes.append(len(rows))
        replay = super().replay(prompts, rollout, rows)
        # It says which rows these are, and each process counts its own.
        return replace(replay, outside_codebook=torch.zeros_like(replay.entropy))


def make_part(processes: Processes) -> Experience:
    """This process's part of one batch, as far as an update reads it."""
    whole = make_experience(make_logits(), ADVANTAGES, reference=make_logits(seed=5))
    rows = processes.part(len(ADVANTAGES))
    own = slice(rows.start, rows.stop)
    return replace(
        whole,
        prompts=part_of_batch(whole.prompts, rows),
        rollout=Rollout(whole.rollout.token_ids[own], whole.rollout.log_probs[own], None),
        totals=whole.totals[own],
        penalties=whole.penalties[own],
        advantages=whole.advantages[own],
        reference_log_probs=whole.reference_log_probs[own],
    )


def learn(processes: Processes, accelerator, micro_batch_size: int) -> dict:
    """Three updates; what the policy is then, what was reported, and what was replayed here."""
    policy = TeamPolicy()
    strategy = (
        Strategy() if processes.count == 1 else AccelerateStrategy(policy, accelerator, processes)
    )
    optimizer = torch.optim.SGD(policy.network.parameters(), lr=0.5)
    learner = make_learner(policy, optimizer, strategy, max_grad_norm=0.25)
    settings = changed(SETTINGS, micro_batch_size=micro_batch_size)
    reports = update_policy(learner, make_part(processes), *settings)
    return {
        "logits": policy.logits.tolist(),
        "reports": [dict(report.metrics) for report in reports],
        "replayed": policy.sizes,
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
        "alone": learn(Processes(), accelerator, ADVANTAGES.numel()),
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
