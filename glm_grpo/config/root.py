"""The whole config, and the relations between keys of different sections."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from glm_grpo.config.problems import Problem
from glm_grpo.config.sections import (
    AdvantageSection,
    AsyncSection,
    DataSection,
    DecodeSection,
    EvalSection,
    LossSection,
    ModelSection,
    OptimSection,
    RolloutSection,
    Section,
    TrainSection,
)
from rewards.config import RewardConfig
from rewards.options import RELATION

TrackerName = Literal[
    "tensorboard", "wandb", "mlflow", "trackio", "aim", "clearml", "comet_ml", "dvclive", "swanlab"
]
"""Trackers as accelerate names them."""


_LARGEST_NAMED = 10_000
"""A remedy names no larger divisor: those of a mistyped number would be looked for for hours."""


class Config(Section):
    """A validated run: what `train.py` and the commands work from."""

    # `async` is a word of Python's own.
    model_config = ConfigDict(serialize_by_alias=True)

    model: ModelSection
    """Which model is trained, and how it is held."""
    data: DataSection
    """Where prompts and target images come from."""
    rollout: RolloutSection
    """How images are sampled from the policy."""
    decode: DecodeSection
    """How the frozen decoder turns tokens into pixels."""
    reward: RewardConfig
    """Which terms score an image, and how they are weighed."""
    advantage: AdvantageSection
    """How rewards become advantages."""
    loss: LossSection
    """The clipped surrogate and its regularisation."""
    optim: OptimSection
    """The optimizer and its learning rate."""
    train: TrainSection
    """Length of the run, sizes of its updates, and what is kept."""
    asynchronous: AsyncSection = Field(default_factory=AsyncSection, alias="async")
    """Asynchronous collection through Ray; read where `train.mode` is async."""
    eval: EvalSection
    """Evaluation on the held-out prompts."""
    offload: Literal["none", "modules", "modules_and_optimizer"]
    """What waits in CPU memory while a phase does not need it."""
    trackers: Annotated[tuple[TrackerName, ...], Field(strict=False)]
    """Where metrics and evaluation prompts go besides the run folder; may be empty."""
    run_dir: str = Field(min_length=1)
    """Folder of the run: one for all its processes."""

    @model_validator(mode="after")
    def _check_relations(self) -> Config:
        problems = (
            *_quantization_problems(self.model),
            *_micro_batch_problems(self),
            *_schedule_problems(self.optim, self.train),
            *_advantage_problems(self.advantage),
            *_kl_problems(self.loss),
            *_decode_problems(self.decode, self.rollout),
            *_async_problems(self.asynchronous, self.train),
        )
        if problems:
            raise ValidationError.from_exception_data("Config", [*map(_line_error, problems)])
        return self


def _line_error(problem: Problem) -> InitErrorDetails:
    context = {"rule": problem.rule, "remedy": problem.remedy}
    return InitErrorDetails(
        type=PydanticCustomError(RELATION, "{rule}", context),
        loc=tuple(problem.key.split(".")),
        input=problem.value,
    )


def _quantization_problems(model: ModelSection) -> list[Problem]:
    if model.quantization is None or model.adapter is not None:
        return []
    rule = "must be absent where model.adapter is: weights of 4 bits cannot be trained"
    remedy = "set 'model.adapter={rank: 32, alpha: 64.0}', or leave model.quantization out"
    return [Problem("model.quantization", model.quantization, rule, remedy)]


def _micro_batch_problems(config: Config) -> list[Problem]:
    images = config.rollout.prompts_per_step * config.rollout.group_size
    size = config.train.micro_batch_size
    if images % size == 0:
        return []
    largest = min(images, _LARGEST_NAMED)
    divisors = [number for number in range(1, largest + 1) if images % number == 0]
    nearest = sorted(sorted(divisors, key=lambda divisor: abs(divisor - size))[:3])
    rule = (
        f"must divide rollout.prompts_per_step * rollout.group_size = "
        f"{config.rollout.prompts_per_step} * {config.rollout.group_size} = {images}"
    )
    remedy = f"set train.micro_batch_size to one of {', '.join(map(str, nearest))}"
    return [Problem("train.micro_batch_size", size, rule, remedy)]


def _schedule_problems(optim: OptimSection, train: TrainSection) -> list[Problem]:
    if optim.warmup_steps <= train.steps:
        return []
    rule = f"must not exceed train.steps = {train.steps}, or the learning rate never gets there"
    remedy = f"set optim.warmup_steps={train.steps} or less, or more train.steps"
    return [Problem("optim.warmup_steps", optim.warmup_steps, rule, remedy)]


def _advantage_problems(advantage: AdvantageSection) -> list[Problem]:
    if advantage.normalization == "mean_only" or advantage.std_floor > 0.0:
        return []
    rule = (
        f"must be greater than 0 where advantage.normalization is {advantage.normalization}, "
        "which divides by a standard deviation that can be 0"
    )
    remedy = "set advantage.std_floor=0.01, or advantage.normalization=mean_only"
    return [Problem("advantage.std_floor", advantage.std_floor, rule, remedy)]


def _kl_problems(loss: LossSection) -> list[Problem]:
    if loss.kl_placement == "loss" or loss.kl_coef > 0.0:
        return []
    rule = "'reward' needs loss.kl_coef > 0, else no divergence is subtracted from the reward"
    remedy = "set loss.kl_coef=0.02, or loss.kl_placement=loss"
    return [Problem("loss.kl_placement", loss.kl_placement, rule, remedy)]


def _decode_problems(decode: DecodeSection, rollout: RolloutSection) -> list[Problem]:
    steps, cheap = decode.steps, decode.rollout_steps
    if cheap is None or cheap == steps:
        return []
    if cheap > steps:
        rule = f"must not exceed decode.steps = {steps}: evaluations are to be the careful ones"
        remedy = f"set decode.rollout_steps={steps} or less, or leave it out"
        return [Problem("decode.rollout_steps", cheap, rule, remedy)]
    prompts, groups = rollout.prompts_per_step, decode.recheck_groups
    if groups <= prompts:
        return []
    rule = f"must not exceed rollout.prompts_per_step = {prompts}: a step has no more groups"
    remedy = f"set decode.recheck_groups={prompts} or less"
    return [Problem("decode.recheck_groups", groups, rule, remedy)]


def _async_problems(section: AsyncSection, train: TrainSection) -> list[Problem]:
    if train.mode == "sync":
        return []
    age, each = section.max_policy_age, train.updates_per_rollout
    # Batches that may be under way at once: that of the next step, and those that its updates, and
    # the ones after it, will not make too old.
    at_once = age // each + 1
    where = f"where async.max_policy_age = {age} and train.updates_per_rollout = {each}"
    problems = []
    if section.collectors > at_once:
        rule = (
            f"must not exceed {at_once} {where}: so many batches may be under way, and further "
            "collectors would never get one"
        )
        age_needed = (section.collectors - 1) * each
        remedy = f"set async.collectors={at_once}, or async.max_policy_age={age_needed}"
        problems.append(Problem("async.collectors", section.collectors, rule, remedy))
    if section.push_every > at_once * each:
        rule = (
            f"must not exceed {at_once * each} {where}: the collectors would wait for weights that "
            "the learner, waiting for them, never pushes"
        )
        remedy = f"set async.push_every={at_once * each} or less"
        problems.append(Problem("async.push_every", section.push_every, rule, remedy))
    return problems
