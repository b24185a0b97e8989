"""The sections of the config: one class per YAML key, one documented field per option.

The text of every field says what it does and in which unit; errors quote it when they refuse a
value. Fields without a default must be set in the YAML file; optional features are off when their
field is absent. `loss` is in `glm_grpo.config.losses`, `reward` in `rewards.config`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from glm_grpo.output import printable
from glm_grpo.types import Normalization
from rewards.options import LARGEST_INT, MayChange, Options, PathText, problem_at

_BetaCoefficient = Annotated[float, Field(ge=0.0, lt=1.0)]

# These bounds exclude what arithmetic or memory cannot handle, not what is unwise.
_MOST_IMAGES = 65_536
"""Prompts in a step, and images per prompt."""
_LONGEST_SIDE = 16_384
"""Pixels; eight times the published model's side."""
_MOST_STEPS = 10**9
"""Training steps; at one per second, thirty years."""

EMBEDDED_MODELS = {
    "tiny": "tiny/weights/pipeline",
    "tiny_objects": "tiny/objects/weights/janus",
}
"""Values of `model.path` for the models in the package, with their folders in it."""

_LEAST_GPU = 0.0001
"""Smallest fraction of an accelerator that Ray can count."""
_LARGEST_PORT = 65_535

_MOST_TAGS = 32
_LONGEST_TAG = 64
"""Characters; the limit of W&B."""

LONGEST_NOTES = 5_000
"""Characters; MLflow shows no more than that among the settings."""


class AdapterSection(Options):
    """Low-rank adapters on the language model, without dropout.

    Dropout would change a token's probability between sampling and replay, so the ratio would not
    be 1 on-policy.
    """

    rank: int = Field(ge=1, le=16_384)
    """Rank of the low-rank update."""
    alpha: float = Field(ge=1e-6, le=1e6)
    """The update is scaled by alpha / rank."""
    target_modules: Annotated[tuple[str, ...] | None, Field(strict=False, min_length=1)] = Field(
        default=None, examples=["[q_proj,v_proj]"]
    )
    """Names of the linear layers to adapt, as in peft, in every layer of the language model;
    absent: all of them."""


class ModelSection(Options):
    """Which model is trained, and how it is loaded."""

    path: PathText = Field(examples=["tiny"])
    """`tiny` or `tiny_objects` (shipped with the package), a model's folder, or a hub id."""
    dtype: Literal["float32", "bfloat16", "float16"]
    """Dtype of weights and activations; log-probabilities are always float32. Sampling and replay
    agree better in float16 than in bfloat16, but float16 overflows above 65504, so GLM-Image's
    decoder then computes in bfloat16."""
    adapter: AdapterSection | None = None
    """Low-rank adapters; absent: train the language model in full."""
    start_from: PathText | None = Field(default=None, examples=["my-run"])
    """Run folder, or a checkpoint in one, whose trained weights initialise the policy and the
    reference; needs the same model and adapter. Absent: start from the original model."""
    gradient_checkpointing: MayChange[bool]
    """Recompute activations in the backward pass: saves memory, takes about a third more time."""
    quantization: Literal["nf4"] | None = None
    """Load the language model's matrices in 4 bits with bitsandbytes; only adapters can then be
    trained. Absent: load them in `dtype`."""
    compile: MayChange[bool] = True
    """Compile the layers of the language model with Inductor on a CUDA device, for sampling and
    replay. The run first compares compiled and eager layers; if they differ by more than rounding,
    or compilation fails, it continues in eager mode and reports this."""


class DataSection(Options):
    """Where prompts and target images come from."""

    path: PathText = Field(examples=["prompts.txt"])
    """Training prompts: a .txt, .jsonl, .csv or .parquet file, a folder, a hub id, or
    `tiny:train`."""
    eval_path: PathText = Field(examples=["held_out.txt"])
    """Held-out prompts, in any of the same forms, or `tiny:heldout`."""
    sources: int = Field(default=0, ge=0, le=8)
    """Number of source images per prompt, in both files (`source`, `sources`); 0: text-to-image."""


class RolloutSection(Options):
    """How images are sampled from the policy."""

    prompts_per_step: int = Field(ge=1, le=_MOST_IMAGES)
    """P, prompts per step. Each is a row of the file; two rows may have the same text."""
    group_size: int = Field(ge=2, le=_MOST_IMAGES)
    """G, images sampled per prompt. Advantages compare the images of one prompt; a group of one has
    nothing to be compared with."""
    dynamic_sampling_rounds: int = Field(default=0, ge=0, le=100)
    """How often per step to replace groups whose rewards are all equal, which teach nothing, with
    groups of other prompts; 0: never."""
    batch_size: MayChange[int | None] = Field(default=None, ge=1)
    """Images to sample at once, in whole groups; absent: all. Changes memory and speed, and the
    samples only by rounding."""
    height: int = Field(ge=16, le=_LONGEST_SIDE, examples=[1024])
    """Image height in pixels; the model may allow only some, such as multiples of 32."""
    width: int = Field(ge=16, le=_LONGEST_SIDE, examples=[1024])
    """Image width in pixels; the model may allow only some, such as multiples of 32."""
    temperature: float = Field(ge=1e-3, le=1e3)
    """Divides the logits; 1 samples from the model's own distribution."""
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    """Sample only from the most probable tokens that together reach this probability; absent: from
    all tokens."""
    top_k: int | None = Field(default=None, ge=1)
    """Sample only from this many most probable tokens; absent: from all tokens."""
    min_p: float | None = Field(default=None, gt=0.0, lt=1.0)
    """When sampling, drop tokens less probable than this fraction of the top token; absent: drop
    none."""
    guidance_scale: float | None = Field(default=None, ge=1.0, le=1e3, examples=[5.0])
    """Scale of classifier-free guidance between tokens (Janus-Pro); tokens are sampled from, and
    scored under, the guided distribution. Above 1, every image takes two rows. Absent: the
    published scale."""


class DecodeSection(Options):
    """How the frozen decoder turns tokens into pixels.

    Most keys are of decoders that denoise; those that a model's decoder does not have must be
    absent.
    """

    steps: int | None = Field(default=None, ge=1, le=10_000)
    """Denoising steps per image; must be set for a decoder that denoises."""
    guidance_scale: float | None = Field(default=None, ge=1.0, le=1e3, examples=[1.5])
    """Scale of classifier-free guidance; above 1, every denoising step runs twice. Must be set for
    a decoder that denoises."""
    rollout_steps: int | None = Field(default=None, ge=1)
    """Denoising steps per training image, at most `decode.steps`; evaluations always use
    `decode.steps`. Absent: training uses `decode.steps` too."""
    recheck_every: MayChange[int] = Field(default=10, ge=1)
    """Training steps between rechecks, from step 1 on. A recheck also decodes some groups with all
    steps, to see whether fewer `rollout_steps` rank the images alike; it needs `rollout_steps`
    below `steps`."""
    recheck_groups: MayChange[int] = Field(default=4, ge=1)
    """Prompts per recheck whose images are decoded with all steps, at most
    `rollout.prompts_per_step`."""
    min_rank_correlation: MayChange[float] = Field(default=0.9, ge=-1.0, le=1.0)
    """A recheck warns if the Spearman correlation of the totals within groups is below this."""
    batch_size: MayChange[int | None] = Field(default=None, ge=1)
    """Images of a group to decode at once; absent: the whole group. Changes memory and speed, not
    the images."""
    vae_batch_size: MayChange[int | None] = Field(default=None, ge=1)
    """How many of those images to pass through the VAE at once, rounded to a divisor of their
    number; absent: one image at a time, or two if they are 128 x 128. Changes memory and speed, not
    the images."""
    compile: MayChange[bool] = True
    """Compile the networks with Inductor on a CUDA device, unless `quantization` is set. The first
    images of a run are also decoded in eager mode; if they differ by more than rounding, or
    compilation fails, the run continues in eager mode and reports this."""
    quantization: Literal["float8"] | None = None
    """Store the diffusion transformer's weights in 8 bits (e4m3) and compute in `model.dtype`;
    absent: store them in `model.dtype`."""

    @property
    def training_steps(self) -> int | None:
        """Denoising steps per training image; None for a decoder without."""
        return self.rollout_steps or self.steps


class AdvantageSection(Options):
    """How rewards become advantages."""

    normalization: Normalization
    """After subtracting the group mean: divide by the group's standard deviation (GRPO), by nothing
    (Dr. GRPO), or by the standard deviation of the centred rewards over the batch, including groups
    that `rollout.dynamic_sampling_rounds` replaced."""
    std_floor: float = Field(ge=0.0)
    """Smallest divisor, in reward units; keeps tiny differences in a group from being amplified."""
    clip: float | None = Field(default=None, gt=0.0)
    """Largest absolute advantage; absent: unlimited."""
    credit: Literal["image", "place"] = "image"
    """`image`: all tokens of an image get its advantage. `place`: each token gets that of the
    places that it draws, from terms that say which places earned their score (ssim, lpips, psnr,
    ocr, composition)."""
    reward_to_go: float = Field(default=0.4, ge=0.0, le=1.0)
    """With `credit: place`, weight of the places that are drawn after a token in its grid: 0 counts
    only its own places, 1 also all that follow (reward-to-go)."""


class OptimSection(Options):
    """AdamW and its learning rate."""

    learning_rate: float = Field(gt=0.0, le=10.0, examples=[1e-4])
    """Peak learning rate, reached after the warm-up."""
    schedule: Literal["cosine", "constant"]
    """After the warm-up, decay along a cosine to 0 at the last step, or stay constant."""
    warmup_steps: int = Field(ge=0)
    """Training steps of linear warm-up from 0. A run with fewer steps ends before it reaches the
    peak."""
    weight_decay: float = Field(ge=0.0, le=1e3)
    """Decoupled weight decay."""
    betas: Annotated[tuple[_BetaCoefficient, _BetaCoefficient], Field(strict=False)]
    """Decay rates of the running means of the gradient and its square."""
    epsilon: float = Field(gt=0.0, le=1.0, examples=[1e-8])
    """Added to the denominator of the update; a large value swamps small gradients."""
    max_grad_norm: float = Field(gt=0.0)
    """Largest Euclidean norm of the gradient; larger ones are scaled down to it."""


class TrainSection(Options):
    """Length of the run, sizes of its updates, and what to keep."""

    mode: Literal["sync", "async"] = "sync"
    """Alternate collecting and learning (sync), or do both at the same time (async): Ray collectors
    produce the next batches while the learner trains on this one."""
    method: Literal["grpo", "sft"] = "grpo"
    """Learn from rewards of sampled images (grpo), or from the prompts' target images without
    sampling (sft), as a warm start for another run's `model.start_from`."""
    steps: int = Field(ge=1, le=_MOST_STEPS)
    """Number of training steps. Each is one rollout (for sft, the target images of as many prompts)
    and its updates."""
    seed: int = Field(ge=0, le=LARGEST_INT)
    """Seed of the run. Prompts and random numbers of step s depend only on (seed, s)."""
    epochs_per_rollout: int = Field(ge=1, le=10**6)
    """Passes (epochs) over each rollout, with `minibatches` optimizer updates each. Above 1, later
    updates are off-policy."""
    minibatches: int = Field(default=1, ge=1, le=_MOST_IMAGES)
    """Number of parts into which the prompts of a rollout are split, with one optimizer update each
    per epoch. Above 1, later updates are off-policy."""
    skip_zero_std: MayChange[bool] = False
    """Skip the replay of images with advantage 0 if no other part of the loss needs it: the same
    gradient in less time."""
    micro_batch_size: MayChange[int] = Field(ge=1)
    """Images per forward and backward pass, at most prompts_per_step * group_size; the last pass
    may have fewer. Changes memory and speed, not the gradient."""
    checkpoint_every: MayChange[int] = Field(ge=1)
    """Training steps between checkpoints."""
    keep_checkpoints: MayChange[int] = Field(ge=1)
    """Number of newest checkpoints to keep; the best one is kept in addition."""
    eval_every: MayChange[int] = Field(ge=1)
    """Training steps between evaluations; one more runs before the first step and one after the
    last."""
    resume: MayChange[PathText | None] = Field(default=None, examples=["auto"])
    """`auto` (the run in run_dir, or in dated folders the newest unfinished run with these
    settings), a run folder, or a checkpoint in one; absent: start a new run."""
    resume_with_changes: MayChange[bool] = False
    """Resume even if the training prompts, the model, or files or code of a reward or loss have
    changed since the run began; the log and `run.notes` then say what changed. Changed held-out
    prompts are always refused."""

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates per training step."""
        return self.epochs_per_rollout * self.minibatches


class AsyncSection(Options):
    """Asynchronous collection through Ray; read only if `train.mode` is async."""

    collectors: MayChange[int] = Field(default=2, ge=1)
    """Processes that sample, decode and score, each with its own models."""
    max_policy_age: int = Field(default=1, ge=0)
    """Maximum age, in optimizer updates, of the weights that sample a batch; 0: the same results as
    a synchronous run."""
    push_every: int = Field(default=1, ge=1)
    """Optimizer updates between pushes of the weights to the collectors."""
    address: MayChange[str | None] = Field(default=None, pattern=r"^(auto|[^/\s]+:\d{1,5})$")
    """Address of a running Ray cluster, `host:port` or `auto`; absent: start one on this
    machine."""
    cpus_per_collector: MayChange[int] = Field(default=1, ge=1, le=4096)
    """CPU cores that Ray reserves for each collector, and the number of threads it uses."""
    gpus_per_collector: MayChange[float] = Field(default=0.0, ge=0.0, le=1024.0)
    """Accelerators that Ray reserves for each collector: a fraction of one, or a whole number; 0:
    collectors compute on the CPU."""

    @field_validator("address")
    @classmethod
    def _check_port(cls, address: str | None) -> str | None:
        port = (address or "").rpartition(":")[2]
        if port.isdecimal() and int(port) > _LARGEST_PORT:
            raise ValueError(f"a port is a number from 0 to {_LARGEST_PORT}")
        return address

    @field_validator("gpus_per_collector")
    @classmethod
    def _check_gpus(cls, gpus: float) -> float:
        if (gpus > 1 and not gpus.is_integer()) or 0 < gpus < _LEAST_GPU:
            raise ValueError(
                f"Ray reserves whole accelerators or a fraction of one: 0, {_LEAST_GPU} to 1, or a "
                "whole number"
            )
        return gpus


class SftSection(Options):
    """The SFT term: the cross-entropy of target images, added to the loss of the samples."""

    weight: float = Field(default=0.0, ge=0.0)
    """Weight of the SFT term in the loss: the cross-entropy of the target images' tokens, in nats
    per token. 0: use target images only for scores."""
    final_weight: float | None = Field(default=None, ge=0.0)
    """Weight at the last step, approached linearly; absent: `weight` throughout."""
    preview: Literal["encode", "repeat"] = "encode"
    """How to make preview tokens for a target image: encode the image, scaled down to the preview's
    size (published model), or repeat the nearest target tokens (models trained that way, such as
    the embedded one). Also used with `train.method` sft."""

    @property
    def is_used(self) -> bool:
        """Whether the weight is positive at some step."""
        return self.weight > 0 or bool(self.final_weight)


class EvalSection(Options):
    """Evaluation on the held-out prompts."""

    samples_per_prompt: int = Field(ge=1, le=_MOST_IMAGES)
    """Images sampled per held-out prompt."""
    seed: int = Field(ge=0, le=LARGEST_INT)
    """Seed of the evaluations: the same random numbers at every evaluation, in this and other
    runs."""
    ema_decay: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Evaluate and export a moving average of the weights with this decay per training step, such
    as 0.9; in the first steps, the decay is at most step / (step + 9). Absent: the weights
    themselves."""
    group_by: MayChange[str | None] = Field(default=None, min_length=1, examples=["category"])
    """Also show scores by this column of the prompts, such as `category`; absent: by `tag`, if rows
    have one."""


def _check_text(text: str) -> str:
    if printable(text) != text:
        raise problem_at((), text, "must be text without control characters", "remove them")
    return text


def _check_line(text: str) -> str:
    if not text.strip() or "\n" in text or "\t" in text:
        raise problem_at((), text, "must be one line of text", "write a word or two")
    return _check_text(text)


_Line = Annotated[str, Field(max_length=120), AfterValidator(_check_line)]
_Notes = Annotated[str, Field(max_length=LONGEST_NOTES), AfterValidator(_check_text)]
_Tag = Annotated[str, Field(max_length=_LONGEST_TAG), AfterValidator(_check_line)]


class RunSection(Options):
    """Description of the run for people; has no effect on training."""

    name: MayChange[_Line | None] = None
    """Shown next to the folder in the gallery, comparisons and trackers; absent: only the folder is
    shown."""
    notes: MayChange[_Notes | None] = None
    """Why the run exists and what to look for."""
    tags: MayChange[Annotated[tuple[_Tag, ...], Field(strict=False, max_length=_MOST_TAGS)]] = ()
    """Labels to share among several runs."""
