"""Growth of speed and memory: rollout with the group and the image, update with image and codebook.

python -m benchmarks.growth [--repeats 3] [--picture docs/images/growth.png] [--json FILE]

Tokens a second of one prompt's rollout for groups of 1 to 16; peak memory above the model of the
rollout against the slope of its cache; of the update against the tokens of an image and the entries
of the codebook. Memory is that of the process, measured in processes of their own.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.embedded import first_batch, stock_pipeline, tiny_config
from benchmarks.growth_chart import Growth, Points, draw_growth
from benchmarks.peaks import Size, cache_bytes, measure_in_child
from benchmarks.timing import in_turns, machine, option_parser, rates
from glm_grpo.builders.models import build_policy
from glm_grpo.models.glm_image.token_grid import token_layout


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        groups: Images of the prompt, for tokens a second.
        rollout_groups: For memory at 128 x 128 pixels.
        rollout_sides: Pixels, for memory at the second of `rollout_groups`.
        update_sides: Pixels, for memory at the embedded model's codebook.
        codebooks: Entries, for memory at the last but one of `update_sides`.
    """

    groups: tuple[int, ...] = (1, 2, 4, 8, 16)
    rollout_groups: tuple[int, ...] = (8, 16, 32, 48)
    rollout_sides: tuple[int, ...] = (256, 512, 768)
    update_sides: tuple[int, ...] = (128, 512, 768, 1024)
    codebooks: tuple[int, ...] = (4096, 8192, 16384, 32768, 65536)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = option_parser(__doc__)
    parser.add_argument("--picture", type=Path, help="PNG file of the four curves")
    options = parser.parse_args(arguments)
    growth = measure(Sizes(), options.repeats)
    report = {"machine": machine(), **dataclasses.asdict(growth), **slopes(growth)}
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    if options.picture is not None:
        options.picture.write_bytes(draw_growth(growth))


def measure(sizes: Sizes, repeats: int) -> Growth:
    """All four curves."""
    middle = sizes.rollout_groups[1]
    by_group = [Size(group, 128) for group in sizes.rollout_groups]
    by_side = [Size(middle, side) for side in sizes.rollout_sides]
    peaks = measure_in_child("rollout", [*by_group, *by_side])
    computed = [float(size.images * size.tokens) for size in [*by_group, *by_side]]
    by_tokens = [Size(2, side) for side in sizes.update_sides]
    by_entries = [Size(2, sizes.update_sides[-2], entries) for entries in sizes.codebooks]
    updates = measure_in_child("update", [*by_tokens, *by_entries])
    count = len(by_group)
    return Growth(
        rates=_tokens_per_second(sizes.groups, repeats),
        rollout_by_group=Points(computed[:count], peaks[:count]),
        rollout_by_side=Points(computed[count:], peaks[count:]),
        update_by_tokens=Points(
            [float(size.tokens) for size in by_tokens], updates[: len(by_tokens)]
        ),
        update_by_entries=Points(
            [float(entries) for entries in sizes.codebooks], updates[len(by_tokens) :]
        ),
        cache_bytes=cache_bytes(),
        update_tokens=by_entries[0].tokens,
    )


def slopes(growth: Growth) -> Mapping[str, float]:
    """Bytes a further token, and how much more the largest codebook takes than the smallest."""
    by_group, by_side = growth.rollout_by_group, growth.rollout_by_side
    computed = [*by_group.xs, *by_side.xs]
    rollout = statistics.linear_regression(computed, [*by_group.ys, *by_side.ys]).slope
    update = statistics.linear_regression(growth.update_by_tokens.xs, growth.update_by_tokens.ys)
    return {
        "rollout_bytes_per_token": rollout,
        "rollout_slope_over_cache": rollout / growth.cache_bytes,
        "update_bytes_per_token": update.slope,
        "update_correlation": statistics.correlation(
            growth.update_by_tokens.xs, growth.update_by_tokens.ys
        ),
        "largest_codebook_over_smallest": growth.update_by_entries.ys[-1]
        / growth.update_by_entries.ys[0],
    }


def _tokens_per_second(groups: Sequence[int], repeats: int) -> Points:
    config = tiny_config()
    policy = build_policy(config, stock_pipeline(), needs_reference=False)
    batches = [first_batch(tiny_config(prompts=1, group_size=max(2, group))) for group in groups]
    works = {
        str(group): partial(
            policy.sample,
            # The config refuses groups of one, which nothing is trained on.
            dataclasses.replace(batch, group_size=group),
            policy_step=0,
        )
        for group, batch in zip(groups, batches, strict=True)
    }
    seconds = in_turns(works, repeats=repeats)
    tokens = token_layout(config.rollout.height, config.rollout.width).num_tokens
    medians = [statistics.median(rates(group * tokens, seconds[str(group)])) for group in groups]
    return Points([float(group) for group in groups], medians)


if __name__ == "__main__":
    main()
