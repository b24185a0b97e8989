"""Compare tokens per second of a rollout with the stock pipeline's `generate_prior_tokens`.

python -m benchmarks.rollout [--prompts 2] [--group 8] [--repeats 3] [--json FILE]

Both sample the same number of full grids for the same prompts with the embedded model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.embedded import CPU, first_batch, stock_pipeline, tiny_config
from benchmarks.timing import (
    Labels,
    Result,
    Target,
    compare,
    in_turns,
    option_parser,
    publish,
    rates,
)
from glm_grpo.models.glm_image.family import build_policy
from glm_grpo.models.glm_image.token_grid import token_layout

TARGETS = {(2, 8): Target("at least", 2.5), (8, 8): Target("at least", 2.0)}
"""Targets by prompts and images per prompt."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = option_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--group", type=int, default=8)
    options = parser.parse_args(arguments)
    publish([measure(options.prompts, options.group, options.repeats)], options.json)


def measure(prompts: int, group_size: int, repeats: int) -> Result:
    """Sample `prompts` x `group_size` grids both ways."""
    config = tiny_config(prompts=prompts, group_size=group_size)
    pipeline = stock_pipeline()
    policy = build_policy(config, pipeline)
    batch = first_batch(config)
    captions = [prompt.prompt for prompt in batch.prompts for _ in range(group_size)]

    def ours() -> None:
        policy.sample(batch)

    def stock() -> None:
        with torch.no_grad():
            pipeline.generate_prior_tokens(captions, batch.height, batch.width, device=CPU)

    seconds = in_turns({"ours": ours, "stock": stock}, repeats=repeats)
    tokens = len(captions) * token_layout(batch.height, batch.width).num_tokens
    options = f"--prompts {prompts} --group {group_size} --repeats {repeats}"
    return compare(
        Labels(
            phase=f"rollout {prompts} x {group_size}",
            against="stock generate_prior_tokens",
            unit="tokens/s",
            command=f"python -m benchmarks.rollout {options}",
        ),
        rates(tokens, seconds["ours"]),
        rates(tokens, seconds["stock"]),
        target=TARGETS.get((prompts, group_size)),
        details={"tokens": tokens},
    )


if __name__ == "__main__":
    main()
