"""What each recipe makes of equally many images: held-out words after 2,560 drawn ones.

python -m benchmarks.recipes train [--recipes base cispo ...] [--seeds 0 1 2] [--folder F]
python -m benchmarks.recipes table [--reach 0.6] [--folder F]

`train` makes one run of `train.py` after another, all of configs/tiny.yaml with the overrides of
`RECIPES`, in F/<recipe>/seed-<seed> (F: outputs/recipes). A run that is there already is left
alone, one that was cut short is gone on with: the command can be stopped and given again. A run
takes some six minutes on two cores.

`table` reads what is there. The share of pictures whose text is read without a mistake
(`ocr_exact`), after all images, is compared with recipe `base` word by word, averaged over the
seeds that both have; intervals are paired by word. Images and seconds are those up to the first
evaluation that reaches `--reach`, without the evaluations themselves.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from glm_grpo.run.config import read_config
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_evaluation, read_metrics
from glm_grpo.training.recording.summaries import Interval, paired_bootstrap

ROOT = Path(__file__).resolve().parents[1]
IMAGES = 2560
"""Of every run: 40 steps of 8 x 8."""
BASE = "base"

COMMON = ("trackers=[]", "train.eval_every=10", "train.checkpoint_every=10", "train.resume=auto")

_TWO_BY_TWO = ("train.updates_per_rollout=2", "train.minibatches_per_rollout=2")

# Gamed within some steps: whatever was asked for, pictures get white.
_BRIGHTNESS = (
    *(f"reward.terms.{name}.weight=0" for name in ("lpips", "ssim", "ocr", "aesthetic")),
    "+reward.terms.brightness.kind=custom",
    "+reward.terms.brightness.function=benchmarks.brightness:brightness",
    "+reward.terms.brightness.weight=1",
    "reward.allow_untied=true",
)

RECIPES: Mapping[str, tuple[str, ...]] = {
    BASE: (),
    "updates-2": ("train.updates_per_rollout=2",),
    "updates-4": ("train.updates_per_rollout=4",),
    "minibatches-2": ("train.minibatches_per_rollout=2",),
    "minibatches-4": ("train.minibatches_per_rollout=4",),
    "minibatches-8": ("train.minibatches_per_rollout=8",),
    "two-by-two": _TWO_BY_TWO,
    "gspo": ("loss=gspo", *_TWO_BY_TWO),
    "cispo": ("loss=cispo", *_TWO_BY_TWO),
    "sapo": ("loss=sapo", *_TWO_BY_TWO),
    "gmpo": ("loss=gmpo", *_TWO_BY_TWO),
    "ratio-cap": ("loss.ratio_cap=4", *_TWO_BY_TWO),
    "group-4": ("rollout.prompts_per_step=16", "rollout.group_size=4"),
    "group-16": ("rollout.prompts_per_step=4", "rollout.group_size=16"),
    "rate-1e-4": ("optim.learning_rate=1e-4",),
    "rate-4e-4": ("optim.learning_rate=4e-4",),
    "rate-8e-4": ("optim.learning_rate=8e-4",),
    "kl-0": ("loss.kl_coef=0",),
    "kl-0.1": ("loss.kl_coef=0.1",),
    "kl-0-skip-flat": ("loss.kl_coef=0", "train.skip_flat=true"),
    "following": ("loss.reference_sync_every=5",),
    "entropy": ("loss.entropy_coef=0.001",),
    "top-entropy": ("loss.top_entropy_quantile=0.2",),
    "preview-0.5": ("loss.preview_weight=0.5",),
    "preview-0.8": ("loss.preview_weight=0.8",),
    "min-p": ("rollout.min_p=0.02",),
    "hot": ("rollout.temperature=1.2",),
    "average": ("eval.ema_decay=0.8",),
    "mean-only": ("advantage.normalization=mean_only",),
    "anchor-0.1": ("anchor.weight=0.1",),
    "anchor-1": ("anchor.weight=1",),
    "anchor-1-to-0": ("anchor.weight=1", "anchor.final_weight=0"),
    "sft-10": ("train.method=sft", "train.steps=10"),
    "sft-40": ("train.method=sft",),
    "after-sft-10": ("model.start_from={folder}/sft-10/seed-{seed}",),
    "after-sft-40": ("model.start_from={folder}/sft-40/seed-{seed}",),
    "shares": ("reward.combine=shares",),
    "brightness": _BRIGHTNESS,
    "brightness-bound": (*_BRIGHTNESS, "+reward.terms.ocr.at_least=0.6"),
    "batch-std": ("advantage.normalization=batch_std",),
}
"""Overrides by name; all draw as many images, but for sft-..., which draw none. What a recipe
begins with stands before it."""


@dataclass(frozen=True)
class Finished:
    """One run.

    Attributes:
        exact: Share of each held-out word's pictures without a mistake, in the order of words.
        last: Metrics of the last step with its evaluation.
        untrained: Metrics of step 0.
        reached: Images and seconds up to the first evaluation at which the given share was
            reached; None where it was not.
        departures: Steps with a canary out of its band.
    """

    exact: torch.Tensor
    last: Mapping[str, float | None]
    untrained: Mapping[str, float | None]
    reached: tuple[int, float] | None
    departures: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("do", choices=["train", "table"])
    parser.add_argument("--recipes", nargs="+", choices=[*RECIPES], default=[*RECIPES])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "recipes")
    parser.add_argument("--reach", type=float, default=0.6, help="ocr_exact that counts images")
    parser.add_argument("--steps", type=int, help="fewer, to try it out")
    parser.add_argument("--json", type=Path, help="file for the figures of the table")
    options = parser.parse_args(arguments)
    if options.do == "train":
        # All recipes with the first seed, then the next: a table can be made early.
        for seed in options.seeds:
            for name in options.recipes:
                train(name, seed, options.folder, steps=options.steps)
        return
    runs = read_runs(options.folder, options.recipes, options.seeds, reach=options.reach)
    rows = summarize(runs)
    Console(width=160).print(_table(rows, reach=options.reach))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2))


def train(name: str, seed: int, folder: Path, *, steps: int | None = None) -> None:
    """Make or finish one run; a finished one is left alone.

    Raises:
        subprocess.CalledProcessError: The run failed.
    """
    run_dir = folder / name / f"seed-{seed}"
    if is_finished(RunFolder(run_dir)):
        return
    length = [] if steps is None else [f"train.steps={steps}"]
    overrides = overrides_of(name, seed, folder)
    command = [sys.executable, str(ROOT / "train.py"), *overrides, *COMMON, *length]
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with (folder / name / f"seed-{seed}.log").open("a") as log:
        sys.stderr.write(f"{name}, seed {seed} ...\n")
        subprocess.run(
            [*command, f"train.seed={seed}", f"run_dir={run_dir}"],
            cwd=ROOT,
            check=True,
            stdout=log,
            stderr=log,
        )


def overrides_of(name: str, seed: int, folder: Path) -> list[str]:
    """Of one run, with the run that it begins with."""
    places = {"{folder}": str(folder.resolve()), "{seed}": str(seed)}
    overrides = []
    for each in RECIPES[name]:
        text = each
        for mark, place in places.items():
            text = text.replace(mark, place)
        overrides.append(text)
    return overrides


def is_finished(folder: RunFolder) -> bool:
    """Whether its last step is evaluated."""
    if not (folder.config_path.exists() and folder.metrics_path.exists()):
        return False
    rows = read_metrics(folder)
    last = read_config(folder).train.steps
    return bool(rows) and rows[-1]["step"] == last and rows[-1].get("eval/total") is not None


def read_runs(
    folder: Path, recipes: Sequence[str], seeds: Sequence[int], *, reach: float
) -> dict[str, dict[int, Finished]]:
    """The finished runs by recipe and seed."""
    runs: dict[str, dict[int, Finished]] = defaultdict(dict)
    for name in recipes:
        for seed in seeds:
            run = RunFolder(folder / name / f"seed-{seed}")
            if is_finished(run):
                runs[name][seed] = _read(run, reach)
    return dict(runs)


def _read(folder: RunFolder, reach: float) -> Finished:
    config, rows = read_config(folder), read_metrics(folder)
    a_step = config.rollout.prompts_per_step * config.rollout.group_size
    if config.train.method == "sft":
        a_step = 0
    scores = read_evaluation(folder, config.train.steps, ["prompt_id", "raw/ocr"])
    of_words: dict[str, list[float]] = defaultdict(list)
    for prompt, score in zip(
        *(scores[name].to_pylist() for name in scores.column_names), strict=True
    ):
        of_words[prompt].append(float(score == 1))
    reached, seconds = None, 0.0
    for row in rows:
        seconds += row.get("time/step") or 0.0
        if reached is None and (row.get("eval/ocr_exact") or 0.0) >= reach:
            reached = (int(row["step"] or 0) * a_step, seconds)
    return Finished(
        exact=torch.tensor([fmean(each) for each in of_words.values()]),
        last=rows[-1],
        untrained=rows[0],
        reached=reached,
        departures=sum((row.get("canary/departures") or 0) > 0 for row in rows),
    )


def summarize(runs: Mapping[str, Mapping[int, Finished]]) -> list[dict[str, Any]]:
    """A row for each recipe, the best first."""
    base = runs.get(BASE, {})
    rows: list[dict[str, Any]] = []
    for name, of_seeds in runs.items():
        both = sorted(of_seeds.keys() & base.keys())
        gain: Interval | None = None
        if name != BASE and both:
            before, after = (
                torch.stack([one[seed].exact for seed in both]).mean(dim=0)
                for one in (base, of_seeds)
            )
            gain = paired_bootstrap(before, after, seed=0)
        finished = [of_seeds[seed] for seed in sorted(of_seeds)]
        reached = [each.reached for each in finished if each.reached is not None]
        rows.append(
            {
                "recipe": name,
                "overrides": " ".join(RECIPES[name]),
                "seeds": sorted(of_seeds),
                "ocr_exact": [_figure(each, "eval/ocr_exact") for each in finished],
                "gain": None if gain is None else [gain.mean_difference, gain.low, gain.high],
                **{
                    term: fmean(_figure(each, f"eval/{term}") for each in finished)
                    for term in ("total", "ocr", "lpips", "ssim")
                },
                "reached": len(reached),
                "images": fmean(images for images, _ in reached) if reached else None,
                "seconds": fmean(seconds for _, seconds in reached) if reached else None,
                "departures": [each.departures for each in finished],
            }
        )
    return sorted(rows, key=lambda row: -fmean(row["ocr_exact"]))


def _figure(run: Finished, name: str) -> float:
    value = run.last[name]
    assert value is not None
    return value


def _table(rows: Sequence[Mapping[str, Any]], *, reach: float) -> Table:
    table = Table(title=f"held-out words after {IMAGES} drawn images")
    for name in ("recipe", "ocr_exact by seed", "over base", "95 % interval", "total", "ocr"):
        table.add_column(name)
    for name in ("lpips", "ssim", f"images to {reach:g}", "seconds", "steps out of band"):
        table.add_column(name, justify="right")
    for row in rows:
        gain = row["gain"]
        table.add_row(
            row["recipe"],
            " ".join(f"{each:.3f}" for each in row["ocr_exact"]),
            "" if gain is None else f"{gain[0]:+.3f}",
            "" if gain is None else f"[{gain[1]:+.3f}, {gain[2]:+.3f}]",
            *(f"{row[name]:.3f}" for name in ("total", "ocr", "lpips", "ssim")),
            f"{row['images']:.0f} ({row['reached']} of {len(row['seeds'])})"
            if row["images"] is not None
            else "-",
            f"{row['seconds']:.0f}" if row["seconds"] is not None else "-",
            " ".join(str(each) for each in row["departures"]),
        )
    return table


if __name__ == "__main__":
    main()
