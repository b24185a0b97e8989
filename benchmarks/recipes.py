"""Compare recipes on an equal number of images: held-out words after 2,560 sampled ones.

python -m benchmarks.recipes train [--recipes base cispo ...] [--seeds 0 1 2] [--folder F]
python -m benchmarks.recipes table [--reach 0.6]
python -m benchmarks.recipes page

`train` runs `train.py` several times, each with configs/tiny.yaml, credit by image and the
overrides of `RECIPES`, in F/<recipe>/seed-<seed> (F: outputs/recipes), and appends the results to
benchmarks/recipes.jsonl. A run with results is skipped, and an interrupted one is resumed, so the
command can be stopped and repeated. A run takes about six minutes on two cores.

`table` shows the results. The fraction of images whose text is read without a mistake
(`ocr_exact`), after all images, is compared with recipe `base` word by word, averaged over the
seeds that both have; intervals are paired by word. Images are counted up to the first evaluation
that reaches `--reach`; seconds are those of the training steps up to there, without evaluations, at
the speed of the recipe's fastest run. `page` writes the tables of LOG.md, and
docs/images/recipes.svg.

`hacked-NAME` is recipe NAME with brightness as its only reward and 16 steps: canaries must leave
their bands. `careless-...` learns from targets of which every second one has a wrong letter.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from string import ascii_uppercase
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot
from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from glm_grpo.run.config import read_config
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.summaries import Interval, paired_bootstrap
from glm_grpo.run.tables import read_evaluation, read_metrics
from glm_grpo.tiny import world
from glm_grpo.tiny.prompts import tiny_prompts
from rewards.pictures import encode_png

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "glm_grpo"

ROOT = Path(__file__).resolve().parents[1]
IMAGES = 2560
"""Number of images of every run: 40 steps of 8 x 8."""
BASE = "base"

COMMON = (
    *("trackers=[]", "train.eval_every=10", "train.checkpoint_every=10", "train.resume=auto"),
    # Recipes are compared by image, unless they say otherwise.
    "advantage.credit=image",
)

_TWO_BY_TWO = ("train.updates_per_rollout=2", "train.minibatches_per_rollout=2")

_ANCHOR = ("anchor.weight=1", "anchor.final_weight=0")

# Gamed within a few steps: whatever the prompt, pictures turn white.
_BRIGHTNESS = (
    *(
        override
        for name in ("lpips", "ssim", "ocr", "aesthetic")
        for override in (f"reward.terms.{name}.weight=0", f"+reward.terms.{name}.when=evaluation")
    ),
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
    "place": ("advantage.credit=place",),
    "anchor-0.1": ("anchor.weight=0.1",),
    "anchor-1": ("anchor.weight=1",),
    "anchor-1-to-0": _ANCHOR,
    "anchor-0.3-to-0": ("anchor.weight=0.3", "anchor.final_weight=0"),
    "careless": (),
    "careless-anchor-1-to-0": _ANCHOR,
    "sft-10": ("train.method=sft", "train.steps=10"),
    "sft-40": ("train.method=sft",),
    "after-sft-10": (),
    "after-sft-40": (),
    "after-sft-10-place": ("advantage.credit=place",),
    "after-sft-10-gmpo": ("loss=gmpo", *_TWO_BY_TWO),
    "after-sft-10-min-p": ("rollout.min_p=0.02",),
    "shares": ("reward.combine=shares",),
    # On the untrained model these weights have the shares that `shares` requests.
    "probed-weights": ("lpips=0.15", "ssim=0.07676", "ocr=0.1361", "aesthetic=0.6371"),
    "brightness": _BRIGHTNESS,
    "brightness-bound": (
        *_BRIGHTNESS,
        "reward.terms.ocr.when=always",
        "+reward.terms.ocr.at_least=0.6",
    ),
    "batch-std": ("advantage.normalization=batch_std",),
}
"""Overrides by recipe; all sample the same number of images, except sft-..., which sample none."""

_BEGIN_WITH = {
    "after-sft-10": "sft-10",
    "after-sft-40": "sft-40",
    "after-sft-10-place": "sft-10",
    "after-sft-10-gmpo": "sft-10",
    "after-sft-10-min-p": "sft-10",
}
"""Recipes that start from another recipe's run with the same seed."""

HACKED_STEPS = 16
HACKED: Mapping[str, tuple[str, ...]] = {
    f"hacked-{name}": (*overrides, *_BRIGHTNESS, f"train.steps={HACKED_STEPS}")
    for name, overrides in RECIPES.items()
    if not name.startswith(("sft", "after", "careless", "brightness", "shares", "probed"))
}
"""Recipes with a reward that can be gamed, on fewer images."""
_OVERRIDES = {**RECIPES, **HACKED}

_REMOVED = frozenset({"shares", "brightness-bound", "preview-0.5", "preview-0.8"})
"""Recipes with options that glm-grpo no longer has; their results are kept."""
TRAINABLE = [name for name in _OVERRIDES if name.removeprefix("hacked-") not in _REMOVED]
"""Recipes that can be trained."""

FIGURES = ("total", "ocr", "ocr_exact", "lpips", "ssim", "aesthetic")
LOG = ROOT / "LOG.md"
_BEGIN, _END = "<!-- {}: python -m benchmarks.recipes page -->", "<!-- end of table -->"
_DRAWN = 4
"""Number of recipes with three seeds that get a line, in addition to the base."""


@dataclass(frozen=True)
class Evaluated:
    """Results on the held-out words at one step of a run.

    Attributes:
        images: Images sampled for training up to here.
        seconds: Seconds of the training steps up to here, without evaluations.
        figures: Means by name: total, ocr, ocr_exact, lpips, ssim, aesthetic.
    """

    images: int
    seconds: float
    figures: dict[str, float]


@dataclass(frozen=True)
class Finished:
    """Results of one run.

    Attributes:
        recipe: Name in `RECIPES`.
        seed: Seed of the run.
        overrides: Overrides of configs/tiny.yaml at that time.
        exact: Fraction of each held-out word's images without a mistake, in the order of words.
        evaluations: Evaluations; the first is before training.
        departures: Number of steps with a canary outside its band.
        first_departure: First such step; None: there is none.
        shares: Shares of the advantage, by term: mean over the first and over the last ten steps.
    """

    recipe: str
    seed: int
    overrides: list[str]
    exact: list[float]
    evaluations: list[Evaluated]
    departures: int
    first_departure: int | None = None
    shares: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def last(self) -> Mapping[str, float]:
        """Results after all images."""
        return self.evaluations[-1].figures

    def reached(self, fraction: float) -> int | None:
        """Index of the first evaluation with that fraction of images read without a mistake."""
        found = (each.figures["ocr_exact"] for each in self.evaluations)
        return next((at for at, figure in enumerate(found) if figure >= fraction), None)


RESULTS = Path(__file__).with_suffix(".jsonl")
"""File with one line per run, in the form of `Finished`."""
_FILE = TypeAdapter(Finished)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("do", choices=["train", "table", "page"])
    recipes = [name for name in TRAINABLE if name in RECIPES]
    parser.add_argument("--recipes", nargs="+", choices=TRAINABLE, default=recipes)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "recipes")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--reach", type=float, default=0.6, help="ocr_exact that counts images")
    options = parser.parse_args(arguments)
    runs = read_results(options.results)
    if options.do == "train":
        # All recipes with the first seed, then the next, so that a table can be made early.
        for seed, name in itertools.product(options.seeds, options.recipes):
            if seed not in runs.get(name, {}):
                folder = train(name, seed, options.folder)
                with options.results.open("a") as file:
                    file.write(f"{_FILE.dump_json(read_run(folder, name, seed)).decode()}\n")
        return
    compared = {name: of_seeds for name, of_seeds in runs.items() if name in RECIPES}
    if options.do == "table":
        rows = summarize(compared, reach=options.reach)
        Console(width=160).print(_table(rows, reach=options.reach))
        return
    text = LOG.read_text()
    for name, lines in tables(runs).items():
        begin = _BEGIN.format(name)
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{lines}{_END}{rest.partition(_END)[2]}"
    LOG.write_text(text)
    draw(compared, ROOT / "docs" / "images" / "recipes.svg")


def read_results(file: Path) -> dict[str, dict[int, Finished]]:
    """Read runs by recipe and seed; if a run has two lines, the later one counts."""
    runs: dict[str, dict[int, Finished]] = defaultdict(dict)
    for line in file.read_text().splitlines() if file.exists() else ():
        run = _FILE.validate_json(line)
        runs[run.recipe][run.seed] = run
    return dict(runs)


def train(name: str, seed: int, folder: Path) -> RunFolder:
    """Run or resume one recipe, and the run that it starts from; a finished one is skipped.

    Raises:
        subprocess.CalledProcessError: The run failed.
    """
    run_dir = folder / name / f"seed-{seed}"
    if is_finished(RunFolder(run_dir)):
        return RunFolder(run_dir)
    if name in _BEGIN_WITH:
        train(_BEGIN_WITH[name], seed, folder)
    if name.startswith("careless"):
        write_careless_prompts(folder / "careless" / "prompts.jsonl")
    command = [sys.executable, str(ROOT / "train.py"), *COMMON, *overrides_of(name, seed, folder)]
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
    return RunFolder(run_dir)


def overrides_of(name: str, seed: int, folder: Path) -> list[str]:
    """Overrides of one run, including the run that it starts from."""
    start = _BEGIN_WITH.get(name)
    extra = [f"model.start_from={folder.resolve() / start / f'seed-{seed}'}"] if start else []
    if name.startswith("careless"):
        extra.append(f"data.path={folder.resolve() / 'careless' / 'prompts.jsonl'}")
    return [*_OVERRIDES[name], *extra]


def write_careless_prompts(file: Path) -> None:
    """Write the training prompts, with a wrong letter in every second target image.

    Args:
        file: JSON Lines file; the pictures are written next to it.
    """
    prompts = tiny_prompts("train", height=world.SIZE, width=world.SIZE)
    rng = np.random.default_rng(0)
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for index, sign in enumerate(prompts.signs):
        word = sign.word
        if index % 2:
            at = int(rng.integers(len(word)))
            letter = rng.choice([one for one in ascii_uppercase if one != word[at]])
            word = f"{word[:at]}{letter}{word[at + 1 :]}"
        picture = f"{sign.word.lower()}.png"
        target = world.draw_sign(replace(sign, word=word))
        (file.parent / picture).write_bytes(encode_png(target))
        rows.append({"id": sign.word.lower(), "prompt": world.caption(sign), "target": picture})
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def is_finished(folder: RunFolder) -> bool:
    """Whether the run's last step is evaluated."""
    if not (folder.config_path.exists() and folder.metrics_path.exists()):
        return False
    rows = read_metrics(folder)
    last = read_config(folder).train.steps
    return bool(rows) and rows[-1]["step"] == last and rows[-1].get("eval/total") is not None


def read_run(folder: RunFolder, name: str, seed: int) -> Finished:
    """Read the results of a finished run."""
    config, rows = read_config(folder), read_metrics(folder)
    a_step = config.rollout.prompts_per_step * config.rollout.group_size
    if config.train.method == "sft":
        a_step = 0
    scores = read_evaluation(folder, config.train.steps, ["prompt_id", "raw/ocr"])
    of_words: dict[str, list[float]] = defaultdict(list)
    for prompt, score in zip(
        *(scores[column].to_pylist() for column in scores.column_names), strict=True
    ):
        of_words[prompt].append(float(score == 1))
    evaluations, seconds = [], 0.0
    for row in rows:
        seconds += row.get("time/step") or 0.0
        if row.get("eval/total") is not None:
            figures = {each: row[f"eval/{each}"] for each in FIGURES}
            evaluations.append(
                Evaluated(
                    int(row["step"] or 0) * a_step,
                    round(seconds, 1),
                    {each: round(value, 4) for each, value in figures.items() if value is not None},
                )
            )
    departures = [int(row["step"] or 0) for row in rows if (row.get("canary/departures") or 0) > 0]
    return Finished(
        recipe=name,
        seed=seed,
        overrides=[*_OVERRIDES[name]],
        exact=[round(fmean(each), 4) for each in of_words.values()],
        evaluations=evaluations,
        departures=len(departures),
        first_departure=departures[0] if departures else None,
        shares=_shares(rows),
    )


def _shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Mean share of each term in the advantage, over the first and the last ten steps."""
    ends = "reward/", "/advantage_share"
    columns = [key for key in rows[-1] if key.startswith(ends[0]) and key.endswith(ends[1])]
    steps = [row for row in rows if row.get(columns[0]) is not None] if columns else []
    return {
        key.removeprefix(ends[0]).removesuffix(ends[1]): (
            round(fmean(row[key] for row in steps[:10]), 4),
            round(fmean(row[key] for row in steps[-10:]), 4),
        )
        for key in columns
    }


def summarize(runs: Mapping[str, Mapping[int, Finished]], *, reach: float) -> list[dict[str, Any]]:
    """Make a row per recipe, the best first."""
    base = runs.get(BASE, {})
    rows: list[dict[str, Any]] = []
    for name, of_seeds in runs.items():
        both = sorted(of_seeds.keys() & base.keys())
        gain: Interval | None = None
        if name != BASE and both:
            before, after = (
                torch.tensor([one[seed].exact for seed in both]).mean(dim=0)
                for one in (base, of_seeds)
            )
            gain = paired_bootstrap(before, after, seed=0)
        finished = [of_seeds[seed] for seed in sorted(of_seeds)]
        reached = [(run, at) for run in finished if (at := run.reached(reach)) is not None]
        part = fmean(at / (len(run.evaluations) - 1) for run, at in reached) if reached else 1.0
        start = _BEGIN_WITH.get(name, "")
        before_it = _seconds(runs[start]) if start in runs else 0.0
        rows.append(
            {
                "recipe": name,
                "overrides": [*finished[0].overrides],
                "seeds": sorted(of_seeds),
                "ocr_exact": [each.last["ocr_exact"] for each in finished],
                "gain": None if gain is None else [gain.mean_difference, gain.low, gain.high],
                **{
                    term: fmean(each.last[term] for each in finished)
                    for term in ("total", "ocr", "lpips", "ssim")
                },
                "reached": len(reached),
                "images": fmean(run.evaluations[at].images for run, at in reached)
                if reached
                else None,
                "seconds": before_it + _seconds(of_seeds) * part if reached else None,
                "departures": [each.departures for each in finished],
            }
        )
    return sorted(rows, key=lambda row: -fmean(row["ocr_exact"]))


def _seconds(of_seeds: Mapping[int, Finished]) -> float:
    """Seconds of a recipe's fastest run; other runs may have shared the cores."""
    return min(run.evaluations[-1].seconds for run in of_seeds.values())


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


def tables(runs: Mapping[str, Mapping[int, Finished]]) -> dict[str, str]:
    """Tables of LOG.md in Markdown, by the name in front of them."""
    images = {name: of_seeds for name, of_seeds in runs.items() if name in RECIPES}
    return {
        "words": _of_words(summarize(images, reach=0.6)),
        "shares": _of_shares(
            {name: images[name] for name in ("base", "probed-weights", "shares") if name in images}
        ),
        "hacked": _of_hacked({name: runs[name] for name in HACKED if name in runs}),
    }


def _of_shares(runs: Mapping[str, Mapping[int, Finished]]) -> str:
    lines = [
        "| Recipe | Seed | LPIPS | SSIM | OCR | Aesthetic |",
        "|---|---|---|---|---|---|",
    ]
    for name, of_seeds in runs.items():
        for seed, run in sorted(of_seeds.items()):
            if run.shares:
                shares = (
                    "{:.2f} to {:.2f}".format(*run.shares[term])
                    for term in ("lpips", "ssim", "ocr", "aesthetic")
                )
                lines.append(f"| `{name}` | {seed} | {' | '.join(shares)} |")
    return "".join(f"{line}\n" for line in lines)


def _of_hacked(runs: Mapping[str, Mapping[int, Finished]]) -> str:
    lines = [
        "| Recipe | Brightness | Letters | LPIPS | First step out of band | Steps out of band |",
        "|---|---|---|---|---|---|",
    ]
    for name, of_seeds in runs.items():
        for _, run in sorted(of_seeds.items()):
            first, last = run.evaluations[0].figures, run.last
            changes = (
                f"{first[figure]:.2f} to {last[figure]:.2f}" for figure in ("total", "ocr", "lpips")
            )
            lines.append(
                f"| `{name.removeprefix('hacked-')}` | {' | '.join(changes)} "
                f"| {run.first_departure or 'none'} | {run.departures} |"
            )
    return "".join(f"{line}\n" for line in lines)


def _of_words(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| Recipe | Overrides of `configs/tiny.yaml` | Whole words, by seed | Over `base` "
        "| Letters | LPIPS | SSIM | Images to .6 | Seconds | Steps out of band |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name, gain = row["recipe"], row["gain"]
        overrides = [*row["overrides"]]
        if overrides[: len(_BRIGHTNESS)] == [*_BRIGHTNESS]:
            overrides[: len(_BRIGHTNESS)] = ["<brightness alone>"]
        if name in _BEGIN_WITH:
            overrides.append(f"model.start_from=<run of {_BEGIN_WITH[name]}>")
        if name.startswith("careless"):
            overrides.append("data.path=<careless prompts>")
        images = "never" if row["images"] is None else f"{row['images']:,.0f}"
        if 0 < row["reached"] < len(row["seeds"]):
            images += f" ({row['reached']} of {len(row['seeds'])})"
        cells = [
            f"`{name}`",
            (" ".join(f"`{each}`" for each in overrides) or "none")
            + (" (removed)" if name in _REMOVED else ""),
            " ".join(f"{each:.3f}" for each in row["ocr_exact"]),
            "" if gain is None else f"{gain[0]:+.3f} [{gain[1]:+.3f}, {gain[2]:+.3f}]",
            *(f"{row[term]:.3f}" for term in ("ocr", "lpips", "ssim")),
            images,
            "" if row["seconds"] is None else f"{row['seconds']:.0f}",
            " ".join(str(each) for each in row["departures"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in lines)


def draw(runs: Mapping[str, Mapping[int, Finished]], file: Path) -> None:
    """Draw two panels as an SVG: every recipe's seeds, and the best recipes by sampled images."""
    names = [row["recipe"] for row in summarize(runs, reach=0.6)][::-1]
    figure, (seeds, curves) = pyplot.subplots(
        ncols=2, figsize=(10, 1.2 + 0.19 * len(names)), width_ratios=[2, 3], layout="constrained"
    )
    for height, name in enumerate(names):
        fractions = [run.last["ocr_exact"] for run in runs[name].values()]
        (line,) = seeds.plot(fractions, [height] * len(fractions), ".", color="0.6", alpha=0.8)
        if len(fractions) >= 3:
            line.set_color("C0")
            seeds.plot(fmean(fractions), height, "|", color="C0", markersize=10)
    if BASE in runs:
        seeds.axvline(fmean(run.last["ocr_exact"] for run in runs[BASE].values()), color="0.85")
    seeds.set_yticks(range(len(names)), names, fontsize=7)
    seeds.set(xlabel="held-out words read whole", xlim=(None, 1), ylim=(-1, len(names)))
    with_three = [name for name in names[::-1] if len(runs[name]) >= 3]
    for name in dict.fromkeys([*with_three[:_DRAWN], *({BASE} & runs.keys())]):
        finished = [*runs[name].values()]
        images = [each.images for each in finished[0].evaluations]
        fractions = [
            fmean(run.evaluations[at].figures["ocr_exact"] for run in finished)
            for at in range(len(images))
        ]
        if images[-1] == 0:
            curves.axhline(fractions[-1], linestyle=":", color="0.5", label=f"{name} (none drawn)")
        else:
            curves.plot(images, fractions, marker="o", markersize=4, label=name)
    curves.set(xlabel="images drawn", ylabel="held-out words read whole", ylim=(0, 1))
    curves.legend(fontsize=8, loc="lower right")
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
