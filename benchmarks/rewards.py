"""Measure images per second of the reward terms in a step, and of single images.

python -m benchmarks.rewards [--prompts 4] [--group 8] [--each] [--repeats 3] [--json FILE]

Ours: the four terms of configs/tiny.yaml as in a step, group by group, each in its thread. Theirs:
    the same scorers with their default settings, one image after the other. The scores are
    compared before anything is timed. With --each, every term that needs no download is then
    measured separately, groups against single images; those with published CLIP weights use
    random weights of ViT-B/32, because their speed does not depend on the weights' values.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import open_clip
import torch
from jaxtyping import UInt8
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.embedded import CPU, first_batch, tiny_config
from benchmarks.scorers import one_by_one, plain_rewards
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
from rewards.base import Reward
from rewards.build import build_reward, build_scorer
from rewards.config import RewardConfig
from rewards.types import Prompt

TARGET = Target("at least", 2.0)
TOLERANCE = 1e-4
"""Largest difference of two scores, caused by rounding in batched operations."""
ARCHITECTURE = "ViT-B-32"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = option_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--each", action="store_true", help="every term by itself as well")
    options = parser.parse_args(arguments)
    results = [measure(options.prompts, options.group, options.repeats)]
    if options.each:
        results += [
            measure_term(name, reward, options.group, options.repeats)
            for name, reward in _terms_without_download()
        ]
    publish(results, options.json)


def measure(num_prompts: int, group_size: int, repeats: int) -> Result:
    """Score the same images by all four terms both ways.

    Raises:
        RuntimeError: The scores differ.
    """
    config = tiny_config(prompts=num_prompts, group_size=group_size)
    prompts = first_batch(config).prompts
    pixels = torch.stack([_noisy_images(prompt, group_size) for prompt in prompts])
    flat = [prompt for prompt in prompts for _ in range(group_size)]
    scorer = build_scorer(config.reward, CPU)
    theirs = one_by_one([*plain_rewards(config).values()])
    scores = theirs(flat, pixels.flatten(0, 1))
    difference = (scorer.score(prompts, pixels).raw.flatten(0, 1) - scores).abs().max().item()
    if difference > TOLERANCE:
        raise RuntimeError(f"scores differ by {difference}; at most {TOLERANCE} is rounding")
    seconds = in_turns(
        {
            "ours": lambda: scorer.score(prompts, pixels),
            "theirs": lambda: theirs(flat, pixels.flatten(0, 1)),
        },
        repeats=repeats,
    )
    options = f"--prompts {num_prompts} --group {group_size} --repeats {repeats}"
    return compare(
        Labels(
            phase=f"reward {num_prompts} x {group_size}, {', '.join(scorer.names)}",
            against="the same scorers, image by image",
            unit="images/s",
            command=f"python -m benchmarks.rewards {options}",
        ),
        rates(len(flat), seconds["ours"]),
        rates(len(flat), seconds["theirs"]),
        target=TARGET,
        details={"largest_difference": difference},
    )


def measure_term(name: str, reward: Reward, group_size: int, repeats: int) -> Result:
    """Score one group by one term, at once and one by one."""
    prompt = first_batch(tiny_config(prompts=1, group_size=group_size)).prompts[0]
    prompts = [prompt] * group_size
    pixels = _noisy_images(prompt, group_size)
    single = one_by_one([reward])
    seconds = in_turns(
        {
            "batch": lambda: reward.score(prompts, pixels),
            "one by one": lambda: single(prompts, pixels),
        },
        repeats=repeats,
    )
    return compare(
        Labels(
            phase=f"{name} 1 x {group_size}",
            against="the same term, image by image",
            unit="images/s",
            command=f"python -m benchmarks.rewards --each --group {group_size}",
        ),
        rates(group_size, seconds["batch"]),
        rates(group_size, seconds["one by one"]),
    )


def _noisy_images(prompt: Prompt, count: int) -> UInt8[Tensor, "N 3 H W"]:
    """Add noise to the target image, so that there is a text to detect and read."""
    if prompt.target is None:
        raise ValueError(f"prompt {prompt.prompt_id} has no target; the embedded world gives one")
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 40, (count, *prompt.target.shape), generator=generator)
    return (prompt.target.long() + noise).clamp(0, 255).to(torch.uint8)


def _terms_without_download() -> Iterator[tuple[str, Reward]]:
    config = tiny_config()
    for name, options in config.reward.terms.items():
        yield name, build_reward(options, CPU)
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "clip.safetensors"
        save_file(open_clip.create_model(ARCHITECTURE).state_dict(), weights)
        clip = {"clip_model": ARCHITECTURE, "clip_weights": str(weights)}
        sections: dict[str, dict[str, str]] = {"psnr": {}, "clip_score": clip, "clip_image": clip}
        for name, section in sections.items():
            terms = {name: {"weight": 1.0, **section}}
            options = RewardConfig.model_validate({"terms": terms}).terms[name]
            yield name, build_reward(options, CPU)


if __name__ == "__main__":
    main()
