"""Pictures a second of each reward term, and what a step waits for them.

python benchmarks/reward_terms.py [--side 128] [--group 8] [--repeats 3] [--json FILE]

First every term that needs no download scores the same pictures in groups and one by one, in turns.
Terms on published CLIP weights run on random weights of ViT-B/32, for their speed does not depend
on what they were trained on; `pick_score` and `hps`, whose ViT-H/14 is 6.5 times as large, are not
run. Then steps of the embedded model are drawn and scored with and without overlap, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import open_clip
import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from glm_grpo.build import build_batch, build_prompts, build_stage, collect_settings
from glm_grpo.config import compose_config
from glm_grpo.glm_image.sampling import sample_rollout
from glm_grpo.training.clock import PhaseClock
from glm_grpo.training.collect import Stage, draw_and_score
from rewards.base import Reward
from rewards.build import build_reward, build_scorer
from rewards.config import RewardConfig
from rewards.types import Prompt

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
ARCHITECTURE = "ViT-B-32"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", type=int, default=128, help="pixels of the pictures")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    terms = {name: _measure_term(name, reward, options) for name, reward in _rewards()}
    steps = _measure_overlap(options.repeats)
    report = {
        "side": options.side,
        "group": options.group,
        "threads": torch.get_num_threads(),
        "images_per_second": terms,
        "step": steps,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def _rewards() -> Iterator[tuple[str, Reward]]:
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "clip.safetensors"
        save_file(open_clip.create_model(ARCHITECTURE).state_dict(), weights)
        clip: dict[str, object] = {"clip_model": ARCHITECTURE, "clip_weights": str(weights)}
        quality = "pkg://glm_grpo/tiny/weights/quality_clip/"
        sections: dict[str, dict[str, object]] = {
            "lpips": {"network": "alex", "pretrained": False},
            "ssim": {},
            "psnr": {},
            "ocr": {"engine": "rapidocr"},
            "aesthetic": {
                "clip_model": f"{quality}config.json",
                "clip_weights": f"{quality}model.safetensors",
                "head": f"{quality}head.safetensors",
            },
            "clip_score": clip,
            "clip_image": clip,
        }
        for name, section in sections.items():
            config = RewardConfig.model_validate(
                {"terms": {name: {"weight": 1.0, **section}}, "allow_untied": True}
            )
            yield name, build_reward(config.terms[name], torch.device("cpu"))


def _measure_term(name: str, reward: Reward, options: argparse.Namespace) -> dict[str, float]:
    config = compose_config(CONFIGS, "tiny")
    source = build_prompts(config).training[0]
    target = torch.nn.functional.interpolate(
        _target_of(source)[None].float(), size=(options.side, options.side), mode="nearest"
    )[0].to(torch.uint8)
    prompts = [replace(source, target=target)] * options.group
    noise = torch.randint(
        0, 40, (options.group, *target.shape), generator=torch.Generator().manual_seed(0)
    )
    pixels = (target.long() + noise).clamp(0, 255).to(torch.uint8)

    def batched() -> None:
        reward.score(prompts, pixels)

    def one_by_one() -> None:
        for index in range(options.group):
            reward.score(prompts[:1], pixels[index : index + 1])

    batched()
    seconds = _in_turns({"batch": batched, "one by one": one_by_one}, options.repeats)
    rates = {kind: options.group / value for kind, value in seconds.items()}
    ratio = rates["batch"] / rates["one by one"]
    sys.stdout.write(
        f"{name:<12}{rates['batch']:9.1f} images/s in groups of {options.group}, "
        f"{rates['one by one']:9.1f} one by one: {ratio:.2f} x\n"
    )
    return {**rates, "ratio": ratio}


def _target_of(prompt: Prompt) -> torch.Tensor:
    if prompt.target is None:
        raise ValueError(f"prompt {prompt.prompt_id} has no target; the embedded world gives one")
    return prompt.target


def _measure_overlap(repeats: int) -> dict[str, dict[str, float]]:
    """Seconds of decoding and scoring a step of configs/tiny.yaml, and what it waits for scores."""
    config = compose_config(CONFIGS, "tiny")
    stage = build_stage(config, Accelerator().device, needs_reference=False)
    batch = build_batch(config, build_prompts(config).training, 0)
    truncation = collect_settings(config).truncation
    rollout = sample_rollout(stage.policy, batch, truncation=truncation, policy_step=0)
    waits: dict[str, list[float]] = {"overlap": [], "no overlap": []}
    works: dict[str, Callable[[], None]] = {}
    for kind in waits:
        reward = config.reward.model_copy(update={"overlap": kind == "overlap"})
        part = replace(stage, scorer=build_scorer(reward, torch.device("cpu")))

        def work(part: Stage = part, kind: str = kind) -> None:
            clock = PhaseClock(lambda _: None)
            draw_and_score(part, batch, rollout.token_ids, clock)
            waits[kind].append(clock.seconds()["reward"])

        works[kind] = work
    works["overlap"]()
    waits["overlap"].clear()
    seconds = _in_turns(works, repeats)
    report = {
        kind: {"decode and reward": seconds[kind], "wait": statistics.median(waits[kind])}
        for kind in waits
    }
    ratio = seconds["no overlap"] / seconds["overlap"]
    for kind, figures in report.items():
        sys.stdout.write(
            f"{kind:<12}decoding and scoring {figures['decode and reward']:.2f} s, of which the "
            f"step waits {figures['wait']:.2f} s for scores\n"
        )
    sys.stdout.write(f"overlap is {ratio:.2f} x as fast\n")
    return report


def _in_turns(works: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of each, taken in turns so that a busy machine disturbs all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    main()
