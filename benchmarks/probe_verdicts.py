"""Compare the verdicts of `glm-grpo probe` with what runs of 30 steps gain.

python -m benchmarks.probe_verdicts run NAME FOLDER [--steps 30]
python -m benchmarks.probe_verdicts probe NAME FOLDER [--prompts 64] [--steps 30]
python -m benchmarks.probe_verdicts table FOLDER

NAME is a reward of `REWARDS`, for the miniature that draws shapes. `run` takes about two minutes on
an idle core, and `probe` one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.timing import ROOT
from glm_grpo.api import train
from glm_grpo.config import Config, compose_config


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
    run = commands.add_parser("run")
    run.add_argument("name", choices=REWARDS)
    run.add_argument("folder", type=Path)
    run.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(arguments)
    run_reward(options.name, options.folder, steps=options.steps)


def config_of(name: str, folder: Path, *, steps: int, rest: Sequence[str] = ()) -> Config:
    """Config of a run with a reward, evaluated at its start and end."""
    length = (f"train.steps={steps}", f"train.eval_every={steps}", "train.checkpoint_every=1000")
    where = (f"run_dir={folder / name / 'run'}", "trackers=[]", "eval.samples_per_prompt=4")
    overrides = (*REWARDS[name], *length, *where, *rest)
    return compose_config(ROOT / "configs", "tiny_objects", overrides)


def run_reward(name: str, folder: Path, *, steps: int, rest: Sequence[str] = ()) -> None:
    """Train with a reward; evaluates the held-out prompts before and after."""
    train(config_of(name, folder, steps=steps, rest=rest))


if __name__ == "__main__":
    main()
