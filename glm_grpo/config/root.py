"""The whole config, with the checks that relate keys of different sections."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from glm_grpo.config.losses import LOSSES, AnyLoss, LossSettings
from glm_grpo.config.sections import (
    AdvantageSection,
    AsyncSection,
    DataSection,
    DecodeSection,
    EvalSection,
    ModelSection,
    OptimSection,
    RolloutSection,
    RunSection,
    SftSection,
    TrainSection,
)
from rewards.config import RewardConfig
from rewards.options import RELATION, MayChange, Options, PathText, problem_at
from rewards.problems import Problem

TrackerName = Literal[
    "tensorboard", "wandb", "mlflow", "trackio", "aim", "clearml", "comet_ml", "dvclive", "swanlab"
]
"""Trackers, by their names in accelerate."""


_MOST_PIXELS = 10**12
"""Largest number of pixels in a step. At 32 x 32 pixels a token, the ids and log-probabilities of
the tokens take 12 GB, and the model's activations thousands of times as much."""

_USUAL_SIZES = {
    "rollout.height": 1024,
    "rollout.width": 1024,
    "rollout.prompts_per_step": 64,
    "rollout.group_size": 64,
    "eval.samples_per_prompt": 64,
}
"""If there are too many pixels, the size that exceeds its value here the most was mistyped."""


class Config(Options):
    """A validated run config, the input of `train.py` and the commands."""

    # `async` is a keyword in Python.
    model_config = ConfigDict(serialize_by_alias=True)

    model: ModelSection
    """Which model is trained, and how it is loaded."""
    data: DataSection
    """Where prompts and target images come from."""
    rollout: RolloutSection
    """How images are sampled from the policy."""
    decode: DecodeSection = Field(default_factory=DecodeSection)
    """How the frozen decoder turns tokens into pixels."""
    reward: RewardConfig
    """Which terms score an image, and how they are weighted."""
    advantage: AdvantageSection
    """How rewards become advantages."""
    loss: AnyLoss
    """The loss to minimise; `kind` selects it."""
    sft: SftSection = Field(default_factory=SftSection)
    """The SFT term: target images to learn from, in addition to the samples."""
    optim: OptimSection
    """The optimizer and its learning rate."""
    train: TrainSection
    """Length of the run, sizes of its updates, and what to keep."""
    asynchronous: AsyncSection = Field(default_factory=AsyncSection, alias="async")
    """Asynchronous collection through Ray; read only if `train.mode` is async."""
    eval: EvalSection
    """Evaluation on the held-out prompts."""
    offload: MayChange[Literal["none", "modules", "modules_and_optimizer"]]
    """What to move to CPU memory while a phase does not need it."""
    run: RunSection = Field(default_factory=RunSection)
    """Name, notes and tags that describe the run to people."""
    trackers: MayChange[Annotated[tuple[TrackerName, ...], Field(strict=False)]] = Field(
        examples=["[wandb]"]
    )
    """Where to send metrics and evaluation prompts in addition to the run folder; may be empty."""
    run_dir: MayChange[PathText] = Field(examples=["my-run"])
    """Folder of the run, shared by all its processes."""

    @property
    def needs_reference(self) -> bool:
        """Whether a KL to the reference policy has a weight."""
        return self.train.method == "grpo" and self.loss.kl_coef > 0

    def without_reference(self) -> Config:
        """The same without a KL to the reference policy, for a policy that is not trained."""
        loss = self.loss.model_copy(update={"kl_coef": 0.0})
        return self.model_copy(update={"loss": loss})

    @property
    def reads_targets(self) -> bool:
        """Whether target images are encoded as tokens to learn from."""
        return self.train.method == "sft" or self.sft.is_used

    @field_validator("loss", mode="before")
    @classmethod
    def _choose_loss(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        # A pydantic union would put the kind into the keys of its errors.
        kind = values.get("kind", "clipped")
        if not isinstance(kind, str) or kind not in LOSSES:
            remedy = f"set loss.kind={next(iter(LOSSES))}"
            raise problem_at(("kind",), kind, f"must be one of {', '.join(LOSSES)}", remedy)
        others = {name for each in LOSSES.values() for name in each.model_fields}
        for name in sorted((others - {*LOSSES[kind].model_fields}) & {*values}):
            rule = f"is not an option of loss.kind = {kind}"
            remedy = (
                f"leave it out (on the command line '~loss.{name}', or loss={kind}, the preset), "
                "or set another loss.kind"
            )
            raise problem_at((name,), values[name], rule, remedy)
        return LOSSES[kind].model_validate(values)

    @model_validator(mode="after")
    def _check_relations(self) -> Config:
        problems = (
            *_quantization_problems(self.model),
            *_size_problems(self),
            *_rollout_problems(self.rollout),
            *_advantage_problems(self.advantage),
            *_credit_problems(self),
            *_kl_problems(self.loss),
            *_minibatch_problems(self),
            *_decode_problems(self.decode),
            *_reference_problems(self),
            *_method_problems(self),
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
    rule = "must be absent when model.adapter is absent: 4-bit weights cannot be trained"
    remedy = "set 'model.adapter={rank: 32, alpha: 64.0}', or leave model.quantization out"
    return [Problem("model.quantization", model.quantization, rule, remedy)]


def _size_problems(config: Config) -> list[Problem]:
    rollout, samples = config.rollout, config.eval.samples_per_prompt
    sizes = {"rollout.height": rollout.height, "rollout.width": rollout.width}
    step = {
        "rollout.prompts_per_step": rollout.prompts_per_step,
        "rollout.group_size": rollout.group_size,
    }
    for what, some in (("step", step), ("prompt", {"eval.samples_per_prompt": samples})):
        factors = sizes | some
        pixels = math.prod(factors.values())
        if pixels > _MOST_PIXELS:
            key = max(factors, key=lambda name: factors[name] / _USUAL_SIZES[name])
            rule = (
                f"makes {pixels:,} pixels per {what} ({' * '.join(factors)}); at most "
                f"{_MOST_PIXELS:,} are possible"
            )
            remedy = f"lower {key}, which is usually {_USUAL_SIZES[key]} or less"
            return [Problem(key, factors[key], rule, remedy)]
    return []


def _rollout_problems(rollout: RolloutSection) -> list[Problem]:
    if rollout.batch_size is None or rollout.batch_size >= rollout.group_size:
        return []
    rule = (
        f"must be at least rollout.group_size = {rollout.group_size}: the images of a prompt are "
        "sampled together"
    )
    remedy = f"set rollout.batch_size={rollout.group_size} or more, or a smaller rollout.group_size"
    return [Problem("rollout.batch_size", rollout.batch_size, rule, remedy)]


def _advantage_problems(advantage: AdvantageSection) -> list[Problem]:
    if advantage.normalization == "mean_only" or advantage.std_floor > 0.0:
        return []
    rule = (
        f"must be greater than 0 when advantage.normalization is {advantage.normalization}, which "
        "divides by a standard deviation that can be 0"
    )
    remedy = "set advantage.std_floor=0.01, or advantage.normalization=mean_only"
    return [Problem("advantage.std_floor", advantage.std_floor, rule, remedy)]


def _credit_problems(config: Config) -> list[Problem]:
    if config.advantage.credit == "image" or config.loss.kind != "gmpo":
        return []
    rule = (
        "'place' needs a loss that can weigh each token by itself; gmpo clips an image by the sign "
        "of its one advantage"
    )
    remedy = "set advantage.credit=image, or another loss, such as loss=gspo"
    return [Problem("advantage.credit", config.advantage.credit, rule, remedy)]


def _kl_problems(loss: LossSettings) -> list[Problem]:
    if loss.kl_placement == "loss" or loss.kl_coef > 0.0:
        return []
    rule = "'reward' needs loss.kl_coef > 0, otherwise no divergence is subtracted from the reward"
    remedy = "set loss.kl_coef=0.02, or loss.kl_placement=loss"
    return [Problem("loss.kl_placement", loss.kl_placement, rule, remedy)]


def _reference_problems(config: Config) -> list[Problem]:
    every = config.loss.reference_sync_steps
    if every is None or config.train.mode == "sync":
        return []
    rule = "must be absent when train.mode is async: collectors keep their own reference"
    return [
        Problem("loss.reference_sync_steps", every, rule, "leave it out, or set train.mode=sync")
    ]


def _method_problems(config: Config) -> list[Problem]:
    if config.train.mode == "sync":
        return []
    problems = []
    if config.train.method == "sft":
        rule = "needs train.mode=sync: nothing is sampled, so collectors have no work"
        remedy = "set train.mode=sync, or train.method=grpo"
        problems.append(Problem("train.method", "sft", rule, remedy))
    if config.rollout.dynamic_sampling_rounds > 0:
        rule = "must be 0 when train.mode is async: collectors have only the prompts of their step"
        remedy = "set rollout.dynamic_sampling_rounds=0, or train.mode=sync"
        rounds = config.rollout.dynamic_sampling_rounds
        problems.append(Problem("rollout.dynamic_sampling_rounds", rounds, rule, remedy))
    return problems


def _minibatch_problems(config: Config) -> list[Problem]:
    parts, prompts = config.train.minibatches, config.rollout.prompts_per_step
    if parts <= prompts:
        return []
    rule = f"must not exceed rollout.prompts_per_step = {prompts}: a minibatch has whole groups"
    remedy = f"set train.minibatches={prompts} or less"
    return [Problem("train.minibatches", parts, rule, remedy)]


def estimator_problems(loss: LossSettings) -> list[Problem]:
    """Refuse KL estimators that are useless at their placement; stored runs may still have them."""
    estimator = loss.kl_estimator
    if (estimator == "k1") == (loss.kl_placement == "reward"):
        return []
    if estimator == "k1":
        rule = (
            "needs loss.kl_placement=reward: in the loss the expectation of its gradient is 0, so "
            "it would not hold the policy back"
        )
        remedy = "set loss.kl_estimator=k3_corrected or k2, or loss.kl_placement=reward"
    else:
        rule = (
            "needs loss.kl_placement=loss: the reward subtracts k1, through which no gradient flows"
        )
        remedy = "set loss.kl_estimator=null or k1, or loss.kl_placement=loss"
    return [Problem("loss.kl_estimator", estimator, rule, remedy)]


def _decode_problems(decode: DecodeSection) -> list[Problem]:
    steps, cheap = decode.steps, decode.rollout_steps
    if cheap is None or steps is None or cheap <= steps:
        return []
    # Not lowered to decode.steps: which images are trained on is more than a matter of speed.
    rule = f"must not exceed decode.steps = {steps}: evaluations must not be cheaper than rollouts"
    remedy = f"set decode.rollout_steps={steps} or less, or leave it out"
    return [Problem("decode.rollout_steps", cheap, rule, remedy)]
