"""Tokens a second of a rollout: one prefill per prompt against the stock pipeline.

python benchmarks/rollout.py [--prompts 2] [--group 8] [--repeats 3]

Both sample the same number of full grids for the same prompts from the embedded model, in turns;
the ratio of the medians is printed, and written as JSON with --json FILE.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from glm_grpo.build import model_path
from glm_grpo.glm_image.loading import load_pipeline
from glm_grpo.glm_image.policy import Policy
from glm_grpo.glm_image.sampling import Truncation, sample_rollout
from glm_grpo.glm_image.token_grid import token_layout
from glm_grpo.tiny.prompts import tiny_prompts
from glm_grpo.training.prompts import batch_for_step

SIDE = 128


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pipeline = load_pipeline(model_path("tiny"), dtype=torch.float32)
    policy = Policy(
        pipeline,
        temperature=1.0,
        adapter_rank=None,
        adapter_alpha=1.0,
        is_checkpointing=False,
        needs_reference=False,
        seed=0,
    )
    batch = batch_for_step(
        tiny_prompts("train", height=SIDE, width=SIDE),
        step=0,
        seed=0,
        prompts_per_step=options.prompts,
        group_size=options.group,
    )
    captions = [prompt.prompt for prompt in batch.prompts for _ in range(options.group)]

    def ours() -> None:
        sample_rollout(policy, batch, truncation=Truncation(), policy_step=0)

    def stock() -> None:
        with torch.no_grad():
            pipeline.generate_prior_tokens(captions, SIDE, SIDE, device=torch.device("cpu"))

    tokens = len(captions) * token_layout(SIDE, SIDE).num_tokens
    seconds: dict[str, list[float]] = {"ours": [], "stock": []}
    for _ in range(options.repeats):
        seconds["ours"].append(_timed(ours))
        seconds["stock"].append(_timed(stock))
    rates = {name: tokens / statistics.median(values) for name, values in seconds.items()}
    report = {
        "prompts": options.prompts,
        "group": options.group,
        "threads": torch.get_num_threads(),
        "tokens_per_second": rates,
        "ratio": rates["ours"] / rates["stock"],
        "seconds": seconds,
    }
    sys.stdout.write(
        f"{options.prompts} prompts x {options.group} images: "
        f"{rates['ours']:.0f} tokens/s against {rates['stock']:.0f} (stock): "
        f"{report['ratio']:.2f} x\n"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def _timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
