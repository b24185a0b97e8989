"""Compare the verdicts of `glm-grpo probe` with what runs of 30 steps gain.

python -m benchmarks.probe_verdicts run NAME FOLDER [--steps 30]
python -m benchmarks.probe_verdicts probe NAME FOLDER [--prompts 64] [--steps 30]
python -m benchmarks.probe_verdicts table FOLDER

NAME is a reward of `REWARDS`, for the miniature that draws shapes. `run` takes about two minutes on
an idle core, and `probe` one. The table shows each verdict, by scores and by the gradient, beside
what the held-out prompts gained, and says how often it was right: "can move it" is right if the
interval of the gain is above 0 and the gain is at least a quarter of the spread inside groups of
the base model; "slowly" and "cannot" are right if it is not.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.timing import ROOT
from glm_grpo.api import load_run, train
from glm_grpo.commands.probe import probe_config
from glm_grpo.config import Config, compose_config
from glm_grpo.run.figures import Table, interval

_LEAST_GAIN = 0.25
"""In std inside groups; a saturated reward can gain at most a third."""


def _own(function: str) -> tuple[str, ...]:
    term = f"{{kind: custom, function: benchmarks.probe_rewards:{function}, weight: 1}}"
    return ("reward.terms.composition=null", f"+reward.terms.{function}={term}")


REWARDS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "chance": _own("chance"),
    "verdict": ("reward.terms.composition.score=verdict",),
    "reached": _own("reached"),
    "warm": (*_own("warm"), "advantage.credit=place"),
    "checksum": _own("checksum"),
    "grades": _own("grades"),
    "perfect": _own("perfect"),
    "noisy": _own("noisy"),
    "constant": _own("constant"),
    "of_prompt": _own("of_prompt"),
}
"""Changes of configs/tiny_objects.yaml."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run, probe, table = (commands.add_parser(name) for name in ("run", "probe", "table"))
    for each in (run, probe):
        each.add_argument("name", choices=REWARDS)
        each.add_argument("--steps", type=int, default=30)
    for each in (run, probe, table):
        each.add_argument("folder", type=Path)
    probe.add_argument("--prompts", type=int, default=64)
    options = parser.parse_args(arguments)
    if options.command == "run":
        run_reward(options.name, options.folder, steps=options.steps)
    elif options.command == "probe":
        config = config_of(options.name, options.folder, steps=options.steps)
        probe_reward(options.name, options.folder, config, prompts=options.prompts)
    else:
        print(compare_verdicts(options.folder).markdown())


def config_of(name: str, folder: Path, *, steps: int) -> Config:
    """Config of a run with a reward, evaluated at its start and end."""
    length = (f"train.steps={steps}", f"train.eval_every={steps}", "train.checkpoint_every=1000")
    where = (f"run_dir={folder / name / 'run'}", "trackers=[]", "eval.samples_per_prompt=4")
    overrides = (*REWARDS[name], *length, *where)
    return compose_config(ROOT / "configs", "tiny_objects", overrides)


def run_reward(name: str, folder: Path, *, steps: int) -> None:
    """Train with a reward; evaluates the held-out prompts before and after."""
    train(config_of(name, folder, steps=steps))


def probe_reward(name: str, folder: Path, config: Config, *, prompts: int) -> None:
    """Probe the base model, and store the verdicts by scores and by the gradient."""
    probed = probe_config(
        config, num_prompts=prompts, noises=2, weights=(), directory=folder / name / "probe"
    )
    report = probed.report
    (term,), gradient = report.terms, report.gradient
    if term.verdict is None or report.verdict is None or gradient is None:
        raise SystemExit(f"{name}: the probe ended early; run it again")
    found = {
        "scores": term.verdict.short(),
        "gradient": report.verdict.short(),
        "ground": report.verdict.ground,
        "std_within": report.total.std_within,
        "zero_std": report.total.zero_std_fraction,
        "noise": report.total_noise_fraction,
        **vars(gradient.agreement),
    }
    (folder / name / "probe.json").write_text(json.dumps(found, indent=1))


def compare_verdicts(folder: Path) -> Table:
    """Compare the verdicts with what the runs gained; rewards without both are left out."""
    rows, right = [], {"scores": 0, "gradient": 0}
    for name in REWARDS:
        probe, run = folder / name / "probe.json", folder / name / "run"
        if not (probe.exists() and run.exists()):
            continue
        found: dict[str, Any] = json.loads(probe.read_text())
        gain = load_run(run).summary().loc["total"]
        has_moved = gain.low > 0 and gain.difference >= _LEAST_GAIN * found["std_within"]
        cells = []
        for kind in right:
            is_right = found[kind].startswith("can move it") == has_moved
            right[kind] += is_right
            cells.append(f"{found[kind]} ({'right' if is_right else 'wrong'})")
        rows.append(
            (
                *(name, *cells, f"{found['zero_std']:.2f}", f"{found['noise']:.2f}"),
                f"{found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}]",
                *(f"{found['chance']:.3f}", f"{found['std_within']:.3g}"),
                f"{gain.difference:+.3f}",
                interval(gain.low, gain.high),
            )
        )
    return Table(
        f"verdicts of {len(rows)} rewards",
        (
            *("reward", "by scores", "by the gradient", "zero-std", "noise's part"),
            *("SNR", "p", "std inside groups", "gain", "95 % interval"),
        ),
        tuple(rows),
        f"right: by scores {right['scores']}, by the gradient {right['gradient']}, of {len(rows)}",
    )


if __name__ == "__main__":
    main()
