"""Compare the wall-clock time of a step with the sum of its phases, for a scorer that waits.

python -m benchmarks.overlap [--prompts 8] [--group 8] [--repeats 3] [--json FILE]

Runs a step of configs/tiny.yaml with one reward term: a function that sleeps for 50 ms per image,
like one that calls another machine. Ours scores a group while the next ones are decoded; the sum is
that of the phases (rollout, decode, reward, update) of the same step with `reward.overlap=false`.
With --beside the four terms of the config score too. On two cores they compete with the decoder, so
overlapping them gains nothing, and leaves less waiting time to hide.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from jaxtyping import Float32, UInt8
from torch import Tensor

from benchmarks.embedded import tiny_config
from benchmarks.step import OurStep
from benchmarks.timing import Labels, Result, Target, compare, in_turns, option_parser, publish
from glm_grpo.setup.prepared_run import prepare
from glm_grpo.training.batches import build_batch
from glm_grpo.training.phases import PhaseClock
from rewards.types import Prompt

TARGET = Target("at most", 0.85)
WAIT_SECONDS = 0.05
"""Waiting time per image."""
PHASES = ("rollout", "decode", "reward", "update")
_JUDGE = (
    "+reward.terms.judge.kind=custom",
    "+reward.terms.judge.function=benchmarks.overlap:remote_judge",
    "+reward.terms.judge.weight=0.1",
)


def remote_judge(
    prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
) -> Float32[Tensor, " N"]:
    """Mean brightness, 0..1, after the time that another machine would take."""
    time.sleep(WAIT_SECONDS * len(prompts))
    return pixels.float().mean(dim=(1, 2, 3)) / 255


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = option_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--beside", action="store_true", help="beside the four terms of the config")
    options = parser.parse_args(arguments)
    result = measure(
        options.prompts, options.group, options.repeats, is_beside_others=options.beside
    )
    publish([result], options.json)


def measure(num_prompts: int, group_size: int, repeats: int, *, is_beside_others: bool) -> Result:
    """Run the same steps with and without overlap."""
    clocks: dict[str, list[dict[str, float]]] = {"overlapped": [], "in_phases": []}
    works = {
        kind: _Step(num_prompts, group_size, kind == "overlapped", is_beside_others, kept)
        for kind, kept in clocks.items()
    }
    in_turns(works, repeats=repeats)
    # The first round was the warm-up.
    measured = {kind: kept[1:] for kind, kept in clocks.items()}
    sums = [sum(seconds[phase] for phase in PHASES) for seconds in measured["in_phases"]]
    words = ", beside four others" if is_beside_others else ""
    options = f"--prompts {num_prompts} --group {group_size} --repeats {repeats}"
    return compare(
        Labels(
            phase=f"step {num_prompts} x {group_size}, scorer waits{words}",
            against="sum of its phases",
            unit="s",
            command=f"python -m benchmarks.overlap {options}{' --beside' * is_beside_others}",
        ),
        [seconds["step"] for seconds in measured["overlapped"]],
        sums,
        target=None if is_beside_others else TARGET,
        details={
            f"{phase}_{kind}": statistics.median(seconds[phase] for seconds in kept)
            for kind, kept in measured.items()
            for phase in PHASES
        },
    )


class _Step:
    """Runs the next step at each call, and keeps its seconds by phase."""

    def __init__(
        self,
        num_prompts: int,
        group_size: int,
        is_overlapping: bool,
        is_beside_others: bool,
        kept: list[dict[str, float]],
    ) -> None:
        usual = tiny_config().reward.terms
        without = () if is_beside_others else (f"reward.terms.{name}=null" for name in usual)
        self._config = tiny_config(
            *_JUDGE,
            *without,
            f"reward.overlap={str(is_overlapping).lower()}",
            prompts=num_prompts,
            group_size=group_size,
        )
        self._ours = OurStep(self._config, prepare(self._config).load())
        self._prompts = prepare(self._config).prompts.training
        self._kept = kept

    def __call__(self) -> None:
        batch = build_batch(self._config, self._prompts, len(self._kept) + 1)
        clock = PhaseClock()
        self._ours.step(batch, clock)
        self._kept.append(clock.seconds())


if __name__ == "__main__":
    main()
