"""Time writing, opening and scrolling the gallery of a run of 20,000 images.

python -m benchmarks.gallery [--images 20000] [--folder DIR] [--chromium PATH] [--json FILE]

Makes a run folder like training does (32 small pictures per step, ten evaluations), writes its
gallery, and opens the page from disk in a headless Chromium. Measures the milliseconds from the
request to the first picture of each view, the frames while it scrolls, and the waits after moving a
weight and for the next picture in the large view.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import Page, ViewportSize, sync_playwright

from glm_grpo.config import compose_config, to_yaml
from glm_grpo.grpo.advantages import group_advantages
from glm_grpo.run.folder import RunFolder, write_atomically
from glm_grpo.run.recorder import Recorder, encode
from glm_grpo.studio.gallery import update_gallery, write_gallery
from glm_grpo.types import Evaluation, Experience, ImageBatch, PromptBatch, Rollout
from rewards.reweigh import combine
from rewards.types import Prompt, RewardTable

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SIDE = 64
GROUP = 8
PROMPTS = 4
EVALUATIONS = 10
HELD_OUT = 40
SAMPLES = 2
NAMES = ("lpips", "ssim", "ocr", "aesthetic")
WEIGHTS = (0.4, 0.2, 0.3, 0.1)
SLIDER_MOVES = 20
TRAINING_PROMPTS = 997
"""Number of training prompts."""

_SCROLL = """async (selector) => {
  const found = selector && document.querySelector(selector);
  const area = found || document.scrollingElement;
  const frames = [];
  let last = await new Promise(requestAnimationFrame);
  const end = last + 3000;
  while (last < end) {
    area.scrollTop += 120;
    if (area.scrollTop + area.clientHeight >= area.scrollHeight - 1) area.scrollTop = 0;
    const now = await new Promise(requestAnimationFrame);
    frames.push(now - last);
    last = now;
  }
  return frames;
}"""
"""Scrolls for three seconds, and returns the milliseconds of each frame."""

_HAS_PICTURE = """[...document.querySelectorAll('main img')].some(i => i.complete && i.naturalWidth)
  || document.querySelector('main canvas')"""

_MOVE = """async (value) => {
  const slider = document.querySelector("main input[type=range]");
  const begun = performance.now();
  Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set.call(slider, value);
  slider.dispatchEvent(new Event("input", {bubbles: true}));
  await new Promise(requestAnimationFrame);
  await new Promise(requestAnimationFrame);
  return performance.now() - begun;
}"""
"""Moves the first slider, and returns the milliseconds until the second frame after it."""

_NEXT = """async () => {
  const begun = performance.now();
  const sourceOf = () => document.querySelector("dialog .large-sheet img")?.src;
  const before = sourceOf();
  const event = new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true, cancelable: true});
  document.querySelector(".large-stage").dispatchEvent(event);
  for (;;) {
    await new Promise(requestAnimationFrame);
    const image = document.querySelector("dialog .large-sheet img");
    if (sourceOf() !== before && image.complete && image.naturalWidth) break;
  }
  return performance.now() - begun;
}"""
"""Goes to the next sample in the large view, and returns the milliseconds until its picture is
shown."""


@dataclass(frozen=True)
class ViewTimes:
    """Times of a view.

    Attributes:
        first_picture_ms: Time from the request to the first decoded picture, or the first chart.
        median_frame_ms: Median time of a frame while scrolling.
        slow_frames: Fraction of frames that took longer than 50 ms.
    """

    first_picture_ms: float
    median_frame_ms: float
    slow_frames: float


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--folder", type=Path, help="made, and kept; a temporary one without it")
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        report = _measure(options.folder or Path(temporary) / "run", options)
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def _measure(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    folder = RunFolder(path)
    held_out = EVALUATIONS * HELD_OUT * SAMPLES
    steps = max(EVALUATIONS, (options.images - held_out) // (PROMPTS * GROUP))
    report: dict[str, Any] = {"images": steps * PROMPTS * GROUP + held_out, "steps": steps}
    if not folder.config_path.exists():
        begun = time.perf_counter()
        _make_run(folder, steps)
        report["make_run_s"] = time.perf_counter() - begun
    begun = time.perf_counter()
    write_gallery(folder, ())
    report["write_gallery_s"] = time.perf_counter() - begun
    begun = time.perf_counter()
    update_gallery(folder, steps)
    report["update_gallery_s"] = time.perf_counter() - begun
    report["data_bytes"] = sum(
        file.stat().st_size for file in folder.gallery_path.parent.glob("data/*.js")
    )
    return report | _open(folder.gallery_path.resolve().as_uri(), options.chromium, steps)


def _open(address: str, chromium: str, steps: int) -> dict[str, Any]:
    prompt = _training_prompt(steps, 0)
    large = f"groups?step={steps}&prompt={prompt}&sample=0&large=1"
    views = {
        "progress": "progress",
        "groups": f"groups?step={steps}",
        "weights": "weights",
        "find": "find",
        "curves": "curves",
        "large": large,
    }
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        # Waiting for a condition needs eval, which the page itself forbids.
        page = browser.new_page(viewport=ViewportSize(width=1280, height=800), bypass_csp=True)
        times = {name: asdict(_view(page, f"{address}#{view}")) for name, view in views.items()}
        page.goto(f"{address}#weights")
        page.wait_for_function(_HAS_PICTURE)
        values = [f"{index / SLIDER_MOVES:.2f}" for index in range(1, SLIDER_MOVES + 1)]
        moves = [float(page.evaluate(_MOVE, value)) for value in values]
        page.goto(f"{address}#{large}")
        page.wait_for_selector("dialog img")
        pages = [float(page.evaluate(_NEXT)) for _ in range(GROUP * PROMPTS - GROUP)]
        browser.close()
    return {
        "views": times,
        "slider_ms": {"median": statistics.median(moves), "max": max(moves)},
        "next_picture_ms": {"median": statistics.median(pages), "max": max(pages)},
    }


def _view(page: Page, address: str) -> ViewTimes:
    # Changing only the fragment would not reload the page.
    page.goto("about:blank")
    page.goto(address, wait_until="commit")
    page.wait_for_function(_HAS_PICTURE, timeout=120_000)
    first = float(page.evaluate("performance.now()"))
    page.wait_for_load_state("load")
    selector = "main [class*=scroll], main [class*=region], main [class*=rows]"
    frames: Sequence[float] = page.evaluate(_SCROLL, selector)
    slow = sum(frame > 50 for frame in frames) / len(frames)
    return ViewTimes(first, statistics.median(frames), slow)


def _make_run(folder: RunFolder, steps: int) -> None:
    sizes = {
        "rollout.prompts_per_step": PROMPTS,
        "rollout.group_size": GROUP,
        "train.micro_batch_size": PROMPTS * GROUP,
        "train.steps": steps,
    }
    config = compose_config(CONFIGS, "tiny", [f"{key}={value}" for key, value in sizes.items()])
    write_atomically(folder.config_path, to_yaml(config).encode())
    recorder = Recorder(folder, trackers=(), config={}, combine="weighted_sum")
    generator = torch.Generator().manual_seed(0)
    recorder.record_evaluation(_evaluation(0, generator))
    every = max(1, steps // (EVALUATIONS - 1))
    evaluated = {every * number for number in range(1, EVALUATIONS)}
    for step in range(1, steps + 1):
        experience = _experience(step, generator)
        recorder.record_rollout(experience, encode(experience.images), step)
        recorder.record_step(step, _metrics(experience))
        if step in evaluated:
            recorder.record_evaluation(_evaluation(step, generator))


def _training_prompt(step: int, row: int) -> str:
    return f"train-{(step * PROMPTS + row) % TRAINING_PROMPTS}"


def _experience(step: int, generator: torch.Generator) -> Experience:
    prompts = tuple(_prompt(_training_prompt(step, row)) for row in range(PROMPTS))
    rewards = _scores(prompts, GROUP, generator)
    totals = combine(rewards, mode="weighted_sum")
    seeds = tuple(range(step, step + PROMPTS))
    return Experience(
        prompts=PromptBatch(prompts, GROUP, SIDE, SIDE, seed=step, decode_seeds=seeds),
        rollout=Rollout(
            token_ids=torch.zeros(PROMPTS, GROUP, 4, dtype=torch.int64),
            log_probs=torch.zeros(PROMPTS, GROUP, 4),
            sampling_mask=None,
        ),
        images=ImageBatch(_pictures(PROMPTS, GROUP, generator), seeds),
        rewards=rewards,
        totals=totals,
        penalties=torch.zeros_like(totals),
        advantages=group_advantages(totals, normalization="group_std", std_floor=0.02, clip=5.0),
    )


def _evaluation(step: int, generator: torch.Generator) -> Evaluation:
    prompts = tuple(_prompt(f"held-out-{row}") for row in range(HELD_OUT))
    rewards = _scores(prompts, SAMPLES, generator)
    pixels = _pictures(HELD_OUT, SAMPLES, generator)
    return Evaluation(
        step=step,
        prompts=prompts,
        images=ImageBatch(pixels, tuple(range(HELD_OUT))),
        rewards=rewards,
        totals=combine(rewards, mode="weighted_sum"),
        entropy=torch.ones(HELD_OUT),
    )


def _prompt(prompt_id: str) -> Prompt:
    shade = sum(prompt_id.encode()) % 256
    target = torch.full((3, SIDE, SIDE), shade, dtype=torch.uint8)
    text = f'a sign of a shop, number {prompt_id}, that says "{prompt_id[-4:]}"'
    return Prompt(prompt_id, text, texts=(prompt_id[-4:],), target=target)


def _scores(prompts: Sequence[Prompt], size: int, generator: torch.Generator) -> RewardTable:
    raw = torch.rand(len(prompts), size, len(NAMES), generator=generator)
    return RewardTable(
        names=NAMES,
        raw=raw,
        is_applicable=torch.ones(len(prompts), len(NAMES), dtype=torch.bool),
        weights=torch.tensor(WEIGHTS),
        std_floors=torch.full((len(NAMES),), 1e-4),
        notes={"ocr": tuple((prompt.texts[0],) * size for prompt in prompts)},
    )


def _pictures(rows: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Make coarse coloured squares, which compress like drawings and all differ."""
    coarse = torch.randint(0, 256, (rows, size, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return coarse.repeat_interleave(SIDE // 8, dim=-1).repeat_interleave(SIDE // 8, dim=-2)


def _metrics(experience: Experience) -> dict[str, float]:
    """As many metrics as a step has; their values do not matter here."""
    means = experience.rewards.raw.mean(dim=(0, 1)).tolist()
    named = {f"reward/{name}/mean": mean for name, mean in zip(NAMES, means, strict=True)}
    filler = {f"filler/{number}": 0.123456789 * number for number in range(60)}
    return {"reward/mean": experience.totals.mean().item(), **named, **filler}


if __name__ == "__main__":
    main()
