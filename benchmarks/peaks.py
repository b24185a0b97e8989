"""Peak memory above the model of a rollout and of an update, for many sizes.

Runs in a process of its own (`measure_in_child`), whose memory allocator gives back what is freed;
otherwise the peak of one size would hide that of the next. Needs Linux.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch

from benchmarks.timing import ROOT
from glm_grpo.grpo.losses import ClippedLoss
from glm_grpo.grpo.update import UpdateSettings, update_policy
from glm_grpo.models.glm_image.policy import GlmImagePolicy
from glm_grpo.models.glm_image.token_grid import token_layout
from glm_grpo.tiny.models import TINY, build_policy_model, build_processor
from glm_grpo.types import Advantages, Experience, ImageBatch, PromptBatch, Rollout
from rewards.types import Prompt, RewardTable

Work = Literal["rollout", "update"]

UPDATE = UpdateSettings(
    loss=ClippedLoss(
        clip_low=0.2,
        clip_high=0.2,
        kl_coef=0.02,
        kl_estimator="k3",
        kl_placement="loss",
        kl_behaviour_coef=0.0,
    ),
    max_grad_norm=1.0,
    micro_batch_size=1,
    updates_per_rollout=1,
)
_RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_PROMPT = Prompt("sign", 'white on green: a triangle above the word "OPEN"')
_RANK = 4


@dataclass(frozen=True)
class Size:
    """What is measured.

    Attributes:
        side: Pixels of an image.
        codebook: Entries of the head; otherwise the model has the sizes of the embedded one.
    """

    images: int
    side: int
    codebook: int = TINY.codebook

    @property
    def tokens(self) -> int:
        """T."""
        return token_layout(self.side, self.side).num_tokens


class _ConstantRate:
    """A schedule that leaves the learning rate alone."""

    def step(self) -> None:
        """Nothing to do."""


def measure_in_child(work: Work, sizes: Sequence[Size]) -> list[int]:
    """Bytes of each size, from a child process."""
    command = [sys.executable, "-m", "benchmarks.peaks", work]
    done = subprocess.run(
        [*command, json.dumps([dataclasses.asdict(size) for size in sizes])],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | _RETURN_FREED_MEMORY,
        cwd=ROOT,
    )
    measured: list[int] = json.loads(done.stdout.splitlines()[-1])
    return measured


def cache_bytes() -> int:
    """Of one token and image: keys and values of all layers in fp32."""
    head_size = TINY.hidden_size // TINY.heads
    return 2 * TINY.layers * TINY.key_value_heads * head_size * 4


def _measure(work: Work, size: Size) -> int:
    policy = _policy(size)
    batch = PromptBatch((_PROMPT,), size.images, size.side, size.side, seed=0, decode_seeds=(0,))
    run: Callable[[], object]
    if work == "rollout":

        def run() -> object:
            return policy.sample(batch, policy_step=0)
    else:
        experience = _experience(batch, size)
        optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.0)

        def run() -> object:
            return update_policy(policy, optimizer, _ConstantRate(), experience, UPDATE)

    policy.encode(batch)
    return _peak_above(run)


def _peak_above(run: Callable[[], object]) -> int:
    before = status_bytes("VmRSS")
    reset_peak()
    run()
    return status_bytes("VmHWM") - before


def reset_peak() -> None:
    """Sets this process's VmHWM back to what there is now."""
    Path("/proc/self/clear_refs").write_text("5")


def status_bytes(key: Literal["VmRSS", "VmHWM"]) -> int:
    """This process's memory, or its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith(f"{key}:"))
    return int(kilobytes) * 1024


def _policy(size: Size) -> GlmImagePolicy:
    """Adapters: their gradients are small, so that what grows with the head is seen."""
    sizes = dataclasses.replace(TINY, codebook=size.codebook)
    model = build_policy_model(seed=0, sizes=sizes)
    return GlmImagePolicy(
        SimpleNamespace(vision_language_encoder=model, processor=build_processor(sizes)),
        temperature=1.0,
        adapter_rank=_RANK,
        adapter_alpha=float(_RANK),
        is_checkpointing=False,
        needs_reference=True,
        seed=0,
    )


def _experience(batch: PromptBatch, size: Size) -> Experience:
    """Drawn at random; pictures and scores are of no account."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, size.images, size.tokens)
    totals = torch.randn(1, size.images, generator=generator)
    return Experience(
        prompts=batch,
        rollout=Rollout(
            token_ids=torch.randint(size.codebook, shape, generator=generator),
            log_probs=torch.full(shape, -math.log(size.codebook)),
            sampling_mask=None,
            policy_step=0,
        ),
        images=ImageBatch(torch.zeros(1, size.images, 3, 1, 1, dtype=torch.uint8), (0,)),
        rewards=RewardTable(
            ("none",),
            torch.zeros(1, size.images, 1),
            torch.ones(1, 1, dtype=torch.bool),
            torch.ones(1),
            torch.ones(1),
        ),
        totals=totals,
        penalties=torch.zeros_like(totals),
        advantages=Advantages(totals - totals.mean(), torch.zeros(1, dtype=torch.bool)),
    )


def _main() -> None:
    work: Work = "rollout" if sys.argv[1] == "rollout" else "update"
    # What is made once and kept (threads, kernels) is no part of any size.
    _measure(work, Size(images=2, side=32))
    sizes = [Size(**size) for size in json.loads(sys.argv[2])]
    sys.stdout.write(json.dumps([_measure(work, size) for size in sizes]) + "\n")


if __name__ == "__main__":
    _main()
