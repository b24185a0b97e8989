"""The sections of the config: one class per key of the YAML file, one documented field per option.

Every field says what it does and in which unit; the text is part of the error a user sees when the
value is refused. Fields without a default must be written in the YAML file; those that may be left
out are switched off by their absence. `loss`, `advantage` and `reward` are declared by the code
that reads them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from glm_grpo.grpo.advantages import Normalization
from glm_grpo.output import printable
from rewards.options import LARGEST_INT, Options, PathText, problem_at

_BetaCoefficient = Annotated[float, Field(ge=0.0, lt=1.0)]

# Bounds below are where arithmetic or memory ends, not where sense does.
_MOST_IMAGES = 65_536
"""Prompts of a step, and images of a prompt."""
_LONGEST_SIDE = 16_384
"""Pixels, eight times what the published model draws."""
_MOST_STEPS = 10**9
"""Training steps: thirty years of one a second."""


class AdapterSection(Options):
    """Low-rank adapters on the language model. No dropout: replay must equal sampling."""

    rank: int = Field(ge=1, le=16_384)
    """Rank of the two factors of every adapted matrix."""
    alpha: float = Field(ge=1e-6, le=1e6)
    """Numerator of the adapter's scale, alpha / rank."""


TINY = "tiny"
"""Value of `model.path` for the model shipped with the package; `tiny:` begins its prompt sets."""


class ModelSection(Options):
    """Which model is trained, and how it is held."""

    path: PathText
    """`tiny` (shipped with the package), a folder in the diffusers layout, or a hub id."""
    dtype: Literal["float32", "bfloat16"]
    """Type of weights and activations; log-probabilities are float32 in any case."""
    adapter: AdapterSection | None = None
    """Low-rank adapters; absent: the language model and its head are trained in full."""
    start_from: PathText | None = None
    """A run folder, or a checkpoint in one, whose trained weights this run begins with, and the
    reference too; of the same model and adapter. Absent: the model as it is."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass: less memory, about a third more time."""
    quantization: Literal["nf4"] | None = None
    """Hold the language model's matrices in 4 bits, by bitsandbytes; only adapters can be trained
    on them. Absent: in `dtype`."""
    compile: bool = True
    """Compile the layers of the language model with Inductor on a CUDA device, for sampling and
    replay. They are compared with the eager ones first; where they differ by more than rounding, or
    nothing can be compiled, the run goes on eagerly and says so."""


class DataSection(Options):
    """Where prompts and target images come from."""

    path: PathText
    """Training prompts: a .txt, .jsonl, .csv or .parquet file, a folder, a hub id, `tiny:train`."""
    eval_path: PathText
    """Held-out prompts, in any of the same forms, or `tiny:heldout`."""
    sources: int = Field(default=0, ge=0, le=8)
    """Source pictures of every prompt of both files (`source`, `sources`); 0 for text-to-image."""


class RolloutSection(Options):
    """How images are sampled from the policy."""

    prompts_per_step: int = Field(ge=1, le=_MOST_IMAGES)
    """P, prompts in one step: rows of the file, of which two may have the same text."""
    group_size: int = Field(ge=2, le=_MOST_IMAGES)
    """G, images sampled for each prompt. An advantage compares an image with the others of its
    prompt, so a group of one has nothing to be compared with."""
    refill_rounds: int = Field(default=0, ge=0, le=100)
    """Times in a step that groups whose rewards are all equal, which teach nothing, are replaced by
    groups of other prompts; 0: they stay."""
    height: int = Field(ge=32, le=_LONGEST_SIDE, multiple_of=32)
    """Pixels; the model draws one token per 32 x 32 pixels."""
    width: int = Field(ge=32, le=_LONGEST_SIDE, multiple_of=32)
    """Pixels; the model draws one token per 32 x 32 pixels."""
    temperature: float = Field(ge=1e-3, le=1e3)
    """Divides the logits; 1 samples from the model's own distribution."""
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    """Probability mass that is kept when sampling; absent: nothing is cut off."""
    top_k: int | None = Field(default=None, ge=1)
    """Most probable tokens that are kept when sampling; absent: nothing is cut off."""
    min_p: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Tokens whose probability is below this part of the most probable one's are cut off when
    sampling; absent: none."""


class DecodeSection(Options):
    """How the frozen diffusion decoder turns tokens into pixels."""

    steps: int = Field(ge=1, le=10_000)
    """Denoising steps per image."""
    guidance_scale: float = Field(ge=1.0, le=1e3)
    """Classifier-free guidance; above 1 every denoising step runs twice."""
    rollout_steps: int | None = Field(default=None, ge=1)
    """Denoising steps per image that is trained on, at most `decode.steps`; evaluations take all
    of `decode.steps`. Absent: rollouts too."""
    recheck_every: int = Field(default=10, ge=1)
    """Training steps between rechecks, from step 1 on: some groups are decoded in full too, to see
    whether fewer `rollout_steps` rank their images alike. Without fewer there is no recheck."""
    recheck_groups: int = Field(default=4, ge=1)
    """Prompts whose images are decoded in full in a recheck, at most a step's."""
    min_rank_correlation: float = Field(default=0.9, ge=-1.0, le=1.0)
    """Spearman correlation of the totals inside groups, below which a recheck ends the cheaper
    decode: from the next step on rollouts take all of `decode.steps`. -1: only watch it."""
    batch_size: int | None = Field(default=None, ge=1)
    """Images of a group that are drawn at once; absent: the whole group. Changes memory and speed,
    not the pictures."""
    vae_batch_size: int | None = Field(default=None, ge=1)
    """Images of those that go through the VAE at once, brought to a divisor of their number;
    absent: one, or two of 128 x 128. Changes memory and speed, not the pictures."""
    compile: bool = True
    """Compile the networks with Inductor on a CUDA device, where `quantization` is absent. The
    first images of a run are drawn eagerly as well, and where they differ by more than rounding,
    or nothing can be compiled, the run goes on eagerly and says so."""
    quantization: Literal["float8"] | None = None
    """Hold the diffusion transformer's weights in 8 bits (e4m3) and compute in `model.dtype`;
    absent: hold them in `model.dtype`."""


class AdvantageSection(Options):
    """How rewards become advantages."""

    normalization: Normalization
    """After the group's mean is taken off: divide by the group's standard deviation (GRPO), by
    nothing (Dr. GRPO), or by the standard deviation of what is left over the batch, groups that
    `rollout.refill_rounds` replaced included."""
    std_floor: float = Field(ge=0.0)
    """Smallest divisor, in units of the reward, so that nearly flat groups are not blown up."""
    clip: float | None = Field(default=None, gt=0.0)
    """Largest absolute advantage; absent: not limited."""


class OptimSection(Options):
    """AdamW and its learning rate."""

    learning_rate: float = Field(gt=0.0, le=10.0)
    """Highest learning rate, reached after the warm-up."""
    schedule: Literal["cosine", "constant"]
    """After the warm-up: fall to 0 at the last step along a cosine, or stay."""
    warmup_steps: int = Field(ge=0)
    """Training steps over which the learning rate rises from 0 in a straight line. A run of fewer
    steps ends before it reaches its highest."""
    weight_decay: float = Field(ge=0.0, le=1e3)
    """Decoupled weight decay."""
    betas: Annotated[tuple[_BetaCoefficient, _BetaCoefficient], Field(strict=False)]
    """Decay of the running means of gradient and squared gradient."""
    epsilon: float = Field(gt=0.0, le=1.0)
    """Added to the denominator of the update; a large one swamps small gradients."""
    max_grad_norm: float = Field(gt=0.0)
    """Gradients are scaled down to this Euclidean norm."""


class TrainSection(Options):
    """Length of the run, sizes of its updates, and what is kept."""

    mode: Literal["sync", "async"] = "sync"
    """Collect and learn in turns, or at the same time: collectors make the next batches through
    Ray while this one is trained on."""
    method: Literal["grpo", "sft"] = "grpo"
    """Learn from rewards of sampled images (grpo), or from the target pictures of the prompts,
    without sampling (sft): a warm start for `model.start_from`."""
    steps: int = Field(ge=1, le=_MOST_STEPS)
    """Training steps: one rollout, or the target pictures of so many prompts, and its updates."""
    seed: int = Field(ge=0, le=LARGEST_INT)
    """Prompts, tokens and noise of step s are a function of (seed, s)."""
    updates_per_rollout: int = Field(ge=1, le=10**6)
    """Passes (epochs) over one rollout, each of `minibatches_per_rollout` optimizer updates; above
    1 the later ones are off-policy."""
    minibatches_per_rollout: int = Field(default=1, ge=1, le=_MOST_IMAGES)
    """Parts that the prompts of a rollout are cut into, with an optimizer update for each: k of
    them a pass. Above 1 the later ones are off-policy."""
    skip_flat: bool = False
    """Leave images whose advantage is 0 out of replay where nothing but the advantage weighs them:
    the gradient stays, the update takes less time."""
    micro_batch_size: int = Field(ge=1)
    """Images per forward and backward pass, at most prompts_per_step * group_size; the last pass
    may have fewer. Changes memory and speed, not the gradient."""
    checkpoint_every: int = Field(ge=1)
    """Training steps between checkpoints."""
    keep_checkpoints: int = Field(ge=1)
    """Newest checkpoints that are kept; the best one is kept besides."""
    eval_every: int = Field(ge=1)
    """Training steps between evaluations; there is one before the first and one after the last."""
    resume: PathText | None = None
    """`auto` (the run in run_dir; in dated folders the newest unfinished one of these settings), a
    run folder, or a checkpoint in one; absent: start anew."""

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of a training step."""
        return self.updates_per_rollout * self.minibatches_per_rollout


_LEAST_GPU = 0.0001
"""Part of an accelerator that Ray can count."""
_LARGEST_PORT = 65_535


class AsyncSection(Options):
    """Asynchronous collection through Ray; read where `train.mode` is async."""

    collectors: int = Field(default=2, ge=1)
    """Processes that sample, decode and score, each with models of its own."""
    max_policy_age: int = Field(default=1, ge=0)
    """Optimizer updates between the weights that sample and those that learn, at most; 0: the
    figures of a synchronous run."""
    push_every: int = Field(default=1, ge=1)
    """Optimizer updates from one push of weights to the collectors to the next."""
    on_stale: Literal["truncate", "mask"] = "truncate"
    """Tokens of an older policy are weighted by their importance ratio. Those above
    `max_importance_ratio` get that weight (truncate), or none (mask)."""
    max_importance_ratio: float = Field(default=2.0, ge=1.0)
    """Largest weight of a token of an older policy."""
    min_importance_ratio: float | None = Field(default=None, gt=0.0, le=1.0)
    """Tokens whose ratio is smaller get no weight either, where `on_stale` is mask; absent: they
    have their small one."""
    address: str | None = Field(default=None, pattern=r"^(auto|[^/\s]+:\d{1,5})$")
    """Of a Ray cluster, `host:port` or `auto`; absent: the run starts one on this machine."""
    cpus_per_collector: int = Field(default=1, ge=1, le=4096)
    """Cores that Ray keeps for a collector, and threads it computes with."""
    gpus_per_collector: float = Field(default=0.0, ge=0.0, le=1024.0)
    """Accelerators that Ray keeps for a collector: a share of one, or a whole number; 0: it
    computes on the CPU."""

    @field_validator("on_stale", mode="before")
    @classmethod
    def _read_former_names(cls, value: object) -> object:
        """Configs of runs of before say weigh and drop."""
        former = {"weigh": "truncate", "drop": "mask"}
        return former.get(value, value) if isinstance(value, str) else value

    @field_validator("address")
    @classmethod
    def _check_port(cls, address: str | None) -> str | None:
        port = (address or "").rpartition(":")[2]
        if port.isdecimal() and int(port) > _LARGEST_PORT:
            raise ValueError(f"a port is 0 to {_LARGEST_PORT}")
        return address

    @field_validator("gpus_per_collector")
    @classmethod
    def _check_gpus(cls, gpus: float) -> float:
        if (gpus > 1 and not gpus.is_integer()) or 0 < gpus < _LEAST_GPU:
            raise ValueError(
                f"Ray keeps whole accelerators or a share of one: 0, {_LEAST_GPU} to 1, or a whole "
                "number"
            )
        return gpus


class AnchorSection(Options):
    """Target pictures as examples, beside what the policy samples itself."""

    weight: float = Field(default=0.0, ge=0.0)
    """Weight of the cross-entropy of the target pictures' tokens, nats a token, in the loss; 0:
    targets are used for scores alone."""
    final_weight: float | None = Field(default=None, ge=0.0)
    """Weight at the last step, reached in equal steps; absent: `weight` throughout."""
    preview: Literal["encode", "repeat"] = "encode"
    """Tokens of the preview, of which a target picture has none: those of the picture made as small
    as the preview (for the published model), or the target's nearest ones (for models trained so,
    as the embedded one). Read with `train.method` sft too."""

    @property
    def is_used(self) -> bool:
        """Whether it has a weight at some step."""
        return self.weight > 0 or bool(self.final_weight)


class EvalSection(Options):
    """Evaluation on the held-out prompts."""

    samples_per_prompt: int = Field(ge=1, le=_MOST_IMAGES)
    """Images sampled for each held-out prompt."""
    seed: int = Field(ge=0, le=LARGEST_INT)
    """The same tokens and noise at every evaluation of a run, and across runs."""
    ema_decay: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Evaluate, and export, a moving average of the weights with this decay a training step, such
    as 0.9; absent: the weights themselves."""


def _check_text(text: str) -> str:
    if printable(text) != text:
        raise problem_at((), text, "must be text without control characters", "take them out")
    return text


def _check_line(text: str) -> str:
    if not text.strip() or "\n" in text or "\t" in text:
        raise problem_at((), text, "must be one line of text", "write a word or two")
    return _check_text(text)


_MOST_TAGS = 32
_LONGEST_TAG = 64
"""Characters; what W&B takes."""

_LONGEST_NOTES = 5_000
"""Characters; MLflow shows no longer ones among the settings."""

_Line = Annotated[str, Field(max_length=120), AfterValidator(_check_line)]
_Notes = Annotated[str, Field(max_length=_LONGEST_NOTES), AfterValidator(_check_text)]
_Tag = Annotated[str, Field(max_length=_LONGEST_TAG), AfterValidator(_check_line)]


class RunSection(Options):
    """What is said about the run, for people; it changes nothing that the run does."""

    name: _Line | None = None
    """Shown beside the folder in gallery and comparisons, and by trackers; absent: the folder
    alone."""
    notes: _Notes | None = None
    """Why it was made, what is to be seen."""
    tags: Annotated[tuple[_Tag, ...], Field(strict=False, max_length=_MOST_TAGS)] = ()
    """Words that several runs share."""
