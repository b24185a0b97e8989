"""The whole config, and the relations between keys of different sections."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from glm_grpo.config.problems import Problem
from glm_grpo.config.sections import (
    AdvantageSection,
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


class Config(Section):
    """A validated run: what `train.py` and the commands work from."""

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
            *_precision_problems(self.model),
            *_micro_batch_problems(self),
            *_schedule_problems(self.optim, self.train),
            *_advantage_problems(self.advantage),
            *_kl_problems(self.loss),
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


def _precision_problems(model: ModelSection) -> list[Problem]:
    if model.dtype == "float32" or model.adapter is not None:
        return []
    rule = (
        "must be float32 where model.adapter is absent: a weight in bfloat16 keeps 8 bits, and "
        "updates as small as those of fine-tuning round to no change at all"
    )
    remedy = (
        "set model.adapter={rank: 32, alpha: 64.0} (adapters are float32), or model.dtype=float32"
    )
    return [Problem("model.dtype", model.dtype, rule, remedy)]


def _micro_batch_problems(config: Config) -> list[Problem]:
    images = config.rollout.prompts_per_step * config.rollout.group_size
    size = config.train.micro_batch_size
    if images % size == 0:
        return []
    divisors = [number for number in range(1, images + 1) if images % number == 0]
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
