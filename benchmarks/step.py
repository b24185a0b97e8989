"""Compare images per second of a whole training step with GRPO as in its pseudo-code.

python -m benchmarks.step [--prompts 4] [--group 8] [--repeats 3] [--json FILE]

Ours: `collect` and `update_policy` on configs/tiny.yaml. Theirs: `benchmarks.plain_grpo`. Before
    anything is timed, both learn from the same tokens, and advantages, loss and gradient are
    compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from benchmarks.embedded import stock_pipeline, tiny_config
from benchmarks.plain_grpo import PlainGrpo, Sample
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
from glm_grpo.config import Config
from glm_grpo.grpo.learning_rate import LearningRate
from glm_grpo.grpo.update import Learner, UpdateReport, update_policy
from glm_grpo.setup.prepared_run import prepare
from glm_grpo.training.batches import build_batch
from glm_grpo.training.collect import collect
from glm_grpo.training.models import Models
from glm_grpo.training.phases import PhaseClock
from glm_grpo.types import Experience, PromptBatch

TARGET = Target("at least", 4.0)
TOLERANCE = 1e-4
"""Largest relative difference of gradient norms, and difference of advantages and losses."""


class OurStep:
    """`collect` and `update_policy`, as the training loop runs them.

    Args:
        models: Models of the run.
    """

    def __init__(self, config: Config, models: Models) -> None:
        self._models, self._config = models, config
        optim = config.optim
        self._optimizer = torch.optim.AdamW(
            models.policy.trainable_parameters(),
            lr=optim.learning_rate,
            betas=optim.betas,
            eps=optim.epsilon,
            weight_decay=optim.weight_decay,
        )
        self._rate = LearningRate(
            self._optimizer,
            peak=optim.learning_rate,
            schedule="constant",
            warmup_updates=0,
            total_updates=1,
        )

    def collect(self, batch: PromptBatch, clock: PhaseClock) -> Experience:
        """Sample, decode and score."""
        return collect(self._models, batch, self._config, clock=clock)

    def learn(self, experience: Experience) -> UpdateReport:
        """Run one update."""
        config = self._config
        learner = Learner(
            self._models.policy,
            self._optimizer,
            self._rate,
            max_grad_norm=config.optim.max_grad_norm,
        )
        (report,) = update_policy(learner, experience, config.loss, config.train)
        return report

    def step(self, batch: PromptBatch, clock: PhaseClock) -> None:
        """Collect and learn."""
        experience = self.collect(batch, clock)
        with clock.phase("update"):
            self.learn(experience)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = option_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    options = parser.parse_args(arguments)
    publish([measure(options.prompts, options.group, options.repeats)], options.json)


def measure(num_prompts: int, group_size: int, repeats: int) -> Result:
    """Run steps both ways.

    Raises:
        RuntimeError: The two compute different results.
    """
    # The pseudo-code gives all tokens of an image its advantage.
    config = tiny_config("advantage.credit=image", prompts=num_prompts, group_size=group_size)
    details = compare_learning(config)
    plain = PlainGrpo(config, stock_pipeline())
    ours = OurStep(config, prepare(config).load())
    seconds = in_turns(
        {
            "ours": _with_next_batch(config, lambda batch: ours.step(batch, PhaseClock())),
            "theirs": _with_next_batch(config, plain.step),
        },
        repeats=repeats,
    )
    images = num_prompts * group_size
    options = f"--prompts {num_prompts} --group {group_size} --repeats {repeats}"
    return compare(
        Labels(
            phase=f"whole step {num_prompts} x {group_size}",
            against="GRPO as its pseudo-code reads",
            unit="images/s",
            command=f"python -m benchmarks.step {options}",
        ),
        rates(images, seconds["ours"]),
        rates(images, seconds["theirs"]),
        target=TARGET,
        details=details,
    )


def compare_learning(config: Config) -> dict[str, float]:
    """Differences between the two on the same tokens and rewards.

    Raises:
        RuntimeError: A difference exceeds rounding.
    """
    batch = build_batch(config, prepare(config).prompts.training, 1)
    ours = OurStep(config, prepare(config).load())
    experience = ours.collect(batch, PhaseClock())
    plain = PlainGrpo(config, stock_pipeline())
    samples = [
        Sample(prompt, tokens, log_probs)
        for prompt, group, scored in zip(
            batch.prompts, experience.rollout.token_ids, experience.rollout.log_probs, strict=True
        )
        for tokens, log_probs in zip(group, scored, strict=True)
    ]
    advantages = plain.advantages(experience.totals)
    loss, norm = plain.learn(samples, advantages)
    report = ours.learn(experience)
    differences = {
        "advantages": (advantages - experience.advantages[..., 0]).abs().max().item(),
        "loss": abs(loss - report.loss),
        "gradient_norm": abs(norm / report.metrics["optim/grad_norm"] - 1),
    }
    for name, difference in differences.items():
        if not difference <= TOLERANCE:
            raise RuntimeError(f"{name} differ by {difference}; at most {TOLERANCE} is rounding")
    return {f"{name}_difference": difference for name, difference in differences.items()}


def _with_next_batch(config: Config, work: Callable[[PromptBatch], None]) -> Callable[[], None]:
    """Use the prompts of the next step at each call, so that nothing is cached."""
    prompts = prepare(config).prompts.training
    steps = iter(range(1, config.train.steps + 1))
    return lambda: work(build_batch(config, prompts, next(steps)))


if __name__ == "__main__":
    main()
