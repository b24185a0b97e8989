"""Config -> models, prompts, plain values, trainer; nothing else constructs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator
from diffusers import GlmImagePipeline
from rich.console import Console
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from glm_grpo.config import TINY, Config
from glm_grpo.errors import CheckpointError, ConfigError
from glm_grpo.grpo.losses import CustomLoss
from glm_grpo.grpo.update import UpdateSettings
from glm_grpo.models.base import DTYPES, Policy, Quantization, ReservedTokens
from glm_grpo.models.glm_image.decoder import GlmImageDecoder
from glm_grpo.models.glm_image.export import (
    README,
    StockSettings,
    export_adapter,
    export_pipeline,
    find_license,
)
from glm_grpo.models.glm_image.loading import (
    check_model,
    check_source_size,
    check_target_size,
    load_pipeline,
)
from glm_grpo.models.glm_image.memory import GlmImagePlanner
from glm_grpo.models.glm_image.meta import PUBLISHED_ID, read_part_configs
from glm_grpo.models.glm_image.policy import GlmImagePolicy
from glm_grpo.models.glm_image.sampling import Truncation
from glm_grpo.models.offload import ModulePart, Movable, Offload, OptimizerPart
from glm_grpo.models.planning import Planner
from glm_grpo.output import printable
from glm_grpo.run.config import read_config
from glm_grpo.run.folder import RunFolder, storage_errors
from glm_grpo.run.tables import read_evaluation, read_metrics
from glm_grpo.seeds import derive_seed
from glm_grpo.tiny.prompts import (
    EXAMPLE_CAPTION,
    EXAMPLE_INSTRUCTION,
    is_known,
    known_form,
    tiny_prompts,
)
from glm_grpo.training.asynchronous.ledger import Steps
from glm_grpo.training.asynchronous.ray_cluster import Needs, RayCluster
from glm_grpo.training.asynchronous.ray_collector import CollectorSettings
from glm_grpo.training.asynchronous.source import AsynchronousSource, Recipe, StaleSettings
from glm_grpo.training.checkpoint.files import (
    Checkpoint,
    forget_checkpoints_after,
    prune_checkpoints,
)
from glm_grpo.training.checkpoint.optimizer_state import load_optimizer
from glm_grpo.training.checkpoint.resume import (
    FoundCheckpoint,
    OpenedRun,
    find_checkpoint,
    start_step,
)
from glm_grpo.training.checkpoint.run_state import RunState
from glm_grpo.training.checkpoint.saver import CheckpointSaver
from glm_grpo.training.collect import CollectSettings
from glm_grpo.training.data.places import EMBEDDED
from glm_grpo.training.data.prompts import (
    PromptSource,
    SparePrompts,
    batch_for_step,
    check_prompts_suffice,
    evaluated_at_once,
    evaluation_batches,
    load_prompts,
    spares_for_step,
)
from glm_grpo.training.distributed.processes import ALONE, Processes
from glm_grpo.training.distributed.strategy import AccelerateStrategy, has_shards
from glm_grpo.training.learning_rate import LearningRate
from glm_grpo.training.loop import LoopSettings, Trainer
from glm_grpo.training.monitors.hacking import HackingMonitor
from glm_grpo.training.monitors.recheck import Recheck, RecheckSettings
from glm_grpo.training.moving_average import MovingAverage
from glm_grpo.training.phase import Models, out_of_memory_explained
from glm_grpo.training.recording.progress import Progress
from glm_grpo.training.recording.recorder import Recorder
from glm_grpo.training.recording.run_recorder import RunRecorder
from glm_grpo.training.sources import ExperienceSource, SynchronousSource
from glm_grpo.training.targets import TargetSource
from glm_grpo.types import PromptBatch
from rewards.build import build_scorer
from rewards.problems import Problem, describe_problems
from rewards.steering import MovingWeights
from rewards.types import Prompt

logger = logging.getLogger(__name__)

BatchForStep = Callable[[int], PromptBatch]
"""The prompts of a step, from 0."""

_MOST_NAMED = 3
"""Prompts that a hint names."""

_TINY_LICENSE = "apache-2.0"
"""That of the package."""


def model_path(path: str) -> str:
    """A folder or hub id; `tiny` becomes the folder inside the package."""
    return str(files("glm_grpo.tiny") / "weights" / "pipeline") if path == TINY else path


def build_planner(path: str) -> Planner:
    """What finds the memory of runs of a model.

    Args:
        path: As `model.path`.

    Raises:
        ModelError: The model's configs are not at hand.
    """
    path = model_path(path)
    return GlmImagePlanner(read_part_configs(path), Path(path))


def find_planner(path: str) -> Planner | None:
    """As `build_planner`; None for a hub id whose sizes are not known.

    Any other folder than that of a model is refused when it is loaded.
    """
    is_known = path == PUBLISHED_ID or (Path(model_path(path)) / "model_index.json").is_file()
    return build_planner(path) if is_known else None


def load_models(
    config: Config, device: torch.device, *, needs_reference: bool, is_sharded: bool = False
) -> Models:
    """As `build_models`; memory that runs out is explained.

    Raises:
        GlmGrpoError, RewardError: Something cannot be loaded.
    """
    with out_of_memory_explained("loading", f"{config.model.path} in {config.model.dtype}"):
        return build_models(config, device, needs_reference=needs_reference, is_sharded=is_sharded)


def find_start(config: Config) -> FoundCheckpoint | None:
    """The checkpoint that `model.start_from` names, verified; None where it names none.

    Raises:
        ConfigError: It was trained from another kind of weights.
        CheckpointError: There is no whole checkpoint.
    """
    path = config.model.start_from
    if path is None:
        return None
    if not Path(path).exists():
        raise CheckpointError(
            f"model.start_from = {path!r} is not there; a run begins with its weights, and is held "
            "to them by its KL when it goes on: restore it, or name another"
        )
    found = find_checkpoint(Path(path))
    own, theirs = config.model.adapter, found.config.model.adapter
    if own != theirs:
        rule = f"was trained with model.adapter = {theirs}, and this run has {own}"
        remedy = (
            "set model.adapter as in its config.yaml, or export that run as a pipeline (glm-grpo "
            "export) and set model.path to it"
        )
        raise ConfigError(describe_problems([Problem("model.start_from", path, rule, remedy)]))
    return found


def begin_with(models: Models, start: FoundCheckpoint | None) -> None:
    """Puts the weights of a checkpoint into policy and reference.

    Raises:
        CheckpointError: They do not fit the model.
    """
    if start is not None:
        with start.checkpoint.named():
            models.policy.start_from(start.evaluated)


def build_models(
    config: Config, device: torch.device, *, needs_reference: bool, is_sharded: bool = False
) -> Models:
    """Loads all models and puts them where they belong.

    Args:
        needs_reference: Whether a KL to the untrained policy is weighted.
        is_sharded: Whether the engine places the policy's weights, cut over processes.

    Raises:
        ConfigError: Weights of 4 bits are asked for where there is no accelerator, or the function
            of a custom loss cannot be imported.
        ModelError: The model cannot be loaded.
    """
    if isinstance(config.loss, CustomLoss):
        config.loss.load()
    refuse_without_accelerator(config.model.quantization, is_on_accelerator=device.type != "cpu")
    started = time.perf_counter()
    pipeline = load_pipeline(
        model_path(config.model.path),
        dtype=DTYPES[config.model.dtype],
        quantization=Quantization(
            language=config.model.quantization, decoder=config.decode.quantization
        ),
    )
    logger.info(
        "loaded policy (%s parameters) and decoder (%s) of %s in %.1f s",
        count_parameters(pipeline.vision_language_encoder),
        count_parameters(pipeline.transformer, pipeline.vae, pipeline.text_encoder),
        config.model.path,
        time.perf_counter() - started,
    )
    return place_models(
        config, pipeline, device, needs_reference=needs_reference, is_sharded=is_sharded
    )


def count_parameters(*modules: nn.Module) -> str:
    """How many they have together, such as `4.8 M`."""
    count = sum(weight.numel() for module in modules for weight in module.parameters())
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def place_models(
    config: Config,
    pipeline: GlmImagePipeline,
    device: torch.device,
    *,
    needs_reference: bool,
    is_sharded: bool = False,
) -> Models:
    """Puts the parts of a loaded pipeline, and the reward terms, where they belong.

    Arguments as in `build_models`.
    """
    policy = build_policy(config, pipeline, needs_reference=needs_reference)
    decoder = GlmImageDecoder(
        pipeline,
        steps=config.decode.steps,
        guidance_scale=config.decode.guidance_scale,
        batch_size=config.decode.batch_size,
    )
    is_offloading = config.offload != "none" and device.type != "cpu"
    started = time.perf_counter()
    scorer = build_scorer(
        config.reward,
        torch.device("cpu") if is_offloading else device,
        process_device=device,
    )
    seconds = time.perf_counter() - started
    logger.info("loaded terms %s in %.1f s", ", ".join(scorer.names), seconds)
    reads_pictures = config.data.sources > 0 or config.reads_targets
    modules = {
        # If it is not used it stays on the CPU, where no phase looks for it.
        "vision": policy.source_modules() if reads_pictures else (),
        "policy": policy.modules(),
        "reference": policy.reference_modules(),
        "decoder": decoder.modules(),
        "rewards": scorer.modules(),
    }
    parts: dict[str, Movable] = {}
    for name, group in modules.items():
        if name == "policy" and is_sharded:
            continue
        if is_offloading:
            parts[name] = ModulePart(group, device=device)
        else:
            for module in group:
                module.to(device)
    return Models(policy=policy, decoder=decoder, scorer=scorer, offload=Offload(parts))


def build_policy(
    config: Config, pipeline: GlmImagePipeline, *, needs_reference: bool
) -> GlmImagePolicy:
    """The policy on the parts of a loaded pipeline."""
    adapter = config.model.adapter
    return GlmImagePolicy(
        pipeline,
        temperature=config.rollout.temperature,
        truncation=Truncation(
            top_k=config.rollout.top_k,
            top_p=config.rollout.top_p,
            min_p=config.rollout.min_p,
        ),
        adapter_rank=None if adapter is None else adapter.rank,
        adapter_alpha=0.0 if adapter is None else adapter.alpha,
        is_checkpointing=config.model.gradient_checkpointing,
        needs_reference=needs_reference,
        seed=derive_seed(config.train.seed, "adapter"),
        has_entropy_gradient=config.loss.entropy_coef != 0,
    )


def refuse_without_accelerator(quantization: str | None, *, is_on_accelerator: bool) -> None:
    """What can be said before anything is loaded.

    Args:
        is_on_accelerator: Whether there is one.

    Raises:
        ConfigError: Weights of 4 bits are asked for where there is no accelerator.
    """
    if quantization is not None and not is_on_accelerator:
        raise ConfigError(
            f"model.quantization is {quantization!r}: weights of 4 bits need an accelerator, and "
            "there is none; leave model.quantization out"
        )


def export_model(
    config: Config,
    tensors: Mapping[str, Tensor],
    directory: Path,
    *,
    kind: Literal["adapter", "pipeline"],
    note: Callable[[int], str],
    training: str,
) -> Path:
    """Writes trained weights as other programs load them.

    Args:
        tensors: Of the policy, from a checkpoint.
        directory: New or empty.
        kind: A folder that peft loads, or one that `GlmImagePipeline.from_pretrained` loads.
        note: What users should mind, given the tokens of an image.
        training: Sections of the card, in Markdown.

    Returns:
        The model card, which shows how to draw a picture with it.

    Raises:
        ModelError: The model the run began with cannot be loaded.
        CheckpointError: The tensors do not fit it.
        StorageError: The folder cannot be written.
    """
    base = model_path(config.model.path)
    pipeline = load_pipeline(base, dtype=DTYPES[config.model.dtype])
    policy = build_policy(config, pipeline, needs_reference=False)
    policy.load_state_tensors(tensors)
    height, width = config.rollout.height, config.rollout.width
    settings = StockSettings(
        base=base,
        is_embedded=config.model.path == TINY,
        dtype=config.model.dtype,
        height=height,
        width=width,
        temperature=config.rollout.temperature,
        top_k=config.rollout.top_k,
        top_p=config.rollout.top_p,
        min_p=config.rollout.min_p,
        decode_steps=config.decode.steps,
        guidance_scale=config.decode.guidance_scale,
        outside_codebook=note(
            policy.tokens_per_image(height, width, has_preview=config.data.sources == 0)
        ),
        license=_TINY_LICENSE if config.model.path == TINY else find_license(base),
        training=training,
        prompt=_example_prompt(config),
        num_sources=config.data.sources,
    )
    with storage_errors("write", directory):
        if policy.adapted_model is not None and kind == "adapter":
            export_adapter(policy.adapted_model, settings, directory)
        else:
            export_pipeline(policy, pipeline, settings, directory)
    return directory / README


def _example_prompt(config: Config) -> str:
    """Of a model card: the embedded model knows the prompts of its world alone."""
    is_edit = config.data.sources > 0
    if config.model.path == TINY:
        return EXAMPLE_INSTRUCTION if is_edit else EXAMPLE_CAPTION
    return 'write "OPEN" instead' if is_edit else 'a red sign that says "OPEN"'


@dataclass(frozen=True)
class Prompts:
    """The two prompt sets of a run."""

    training: PromptSource
    held_out: PromptSource


def build_held_out(config: Config) -> PromptSource:
    """Checks the model's files, then loads and checks the held-out prompts alone.

    Raises:
        ModelError, DataError: As `build_prompts`.
    """
    reserved = check_model(model_path(config.model.path))
    return build_prompt_set(config.data.eval_path, config, reserved)


def build_prompts(config: Config) -> Prompts:
    """Checks the model's files, then loads and checks both prompt sets.

    Raises:
        ModelError: The model's files cannot be used.
        DataError: A prompt cannot, or there are fewer than a step takes.
    """
    path = model_path(config.model.path)
    reserved = check_model(path)
    height, width = config.rollout.height, config.rollout.width
    if config.data.sources > 0:
        check_source_size(path, height=height, width=width)
    if config.reads_targets:
        check_target_size(height=height, width=width)
    training = build_prompt_set(config.data.path, config, reserved)
    check_prompts_suffice(training, prompts_per_step=config.rollout.prompts_per_step)
    return Prompts(
        training=training,
        held_out=build_prompt_set(config.data.eval_path, config, reserved),
    )


def hint_at_prompts(config: Config, prompts: Prompts) -> list[str]:
    """Lines on prompts that can be used, but hardly as they were meant; no model is needed."""
    lines = []
    if config.model.path == TINY:
        is_edit = config.data.sources > 0
        for of, prompt_set in (("training", prompts.training), ("held-out", prompts.held_out)):
            rows = [
                row
                for row, caption in enumerate(prompt_set.captions())
                if not is_known(caption, is_edit=is_edit)
            ]
            if rows:
                lines.append(
                    f"{len(rows)} of {len(prompt_set)} {of} prompts are not of the form "
                    f"{known_form(is_edit=is_edit)} that the embedded model knows: "
                    f"{_name_some(prompt_set, rows)}"
                )
    trained = set(prompts.training.identities())
    rows = [row for row, each in enumerate(prompts.held_out.identities()) if each in trained]
    if rows:
        lines.append(
            f"{len(rows)} of {len(prompts.held_out)} held-out prompts are also trained on: "
            f"{_name_some(prompts.held_out, rows)}"
        )
    return lines


def _name_some(prompt_set: PromptSource, rows: Sequence[int]) -> str:
    """Ids of the first prompts."""
    # Each is taken with its pictures.
    named = [printable(prompt_set[row].prompt_id) for row in rows[:_MOST_NAMED]]
    return ", ".join([*named, *(["..."] if len(rows) > _MOST_NAMED else [])])


def check_prompt_sets(config: Config, models: Models, prompts: Prompts) -> list[str]:
    """Refuses prompts that no term can score; lines on terms that apply to few prompts.

    Raises:
        RewardError: See `Scorer.check_prompts`.
        ConfigError: Target pictures are to be learned from, and no training prompt has one.
    """
    targets = 0
    is_supervised = config.train.method == "sft"

    def each(prompt_set: PromptSource) -> Iterator[Prompt]:
        nonlocal targets
        for index in range(len(prompt_set)):
            prompt = prompt_set[index]
            targets += prompt_set is prompts.training and prompt.target is not None
            yield prompt

    named = (("training prompts", prompts.training), ("held-out prompts", prompts.held_out))
    lines = []
    for of, prompt_set in named:
        is_training = prompt_set is prompts.training
        if is_training and is_supervised:
            # They are not scored.
            targets = sum(prompt.target is not None for prompt in each(prompt_set))
            continue
        lines += models.scorer.check_prompts(each(prompt_set), of=of, is_training=is_training)
    if config.rollout.refill_rounds and len(prompts.training) == config.rollout.prompts_per_step:
        lines.append(
            f"rollout.refill_rounds: every step samples all {len(prompts.training)} training "
            "prompts, so that no other can take the place of one; give more prompts or lower "
            "rollout.prompts_per_step"
        )
    if config.reads_targets and targets == 0:
        rule = (
            f"none of the {len(prompts.training)} training prompts has a target picture to learn "
            "from"
        )
        key, value, remedy = (
            ("train.method", "sft", "set train.method=grpo")
            if is_supervised
            else (
                "anchor.weight",
                config.anchor.weight,
                "set anchor.weight=0 and leave anchor.final_weight out",
            )
        )
        problem = Problem(key, value, rule, f"give prompts a target, or {remedy}")
        raise ConfigError(describe_problems([problem]))
    return lines


def build_prompt_set(path: str, config: Config, reserved: ReservedTokens) -> PromptSource:
    """Prompts of a file, a folder, a hub data set, or of the embedded world (`tiny:...`).

    Args:
        reserved: What no prompt may hold.
    """
    height, width = config.rollout.height, config.rollout.width
    if path.startswith(EMBEDDED):
        name = path.removeprefix(EMBEDDED)
        return tiny_prompts(name, height=height, width=width, sources=config.data.sources)
    return load_prompts(
        path, height=height, width=width, reserved=reserved, sources=config.data.sources
    )


def build_batch(config: Config, prompts: PromptSource, step: int) -> PromptBatch:
    """The batch of a step, from 0."""
    return batch_for_step(
        prompts,
        step=step,
        seed=config.train.seed,
        prompts_per_step=config.rollout.prompts_per_step,
        group_size=config.rollout.group_size,
    )


def build_spares(config: Config, prompts: PromptSource, step: int) -> SparePrompts:
    """The prompts that can take the place of those of a step, from 0."""
    return spares_for_step(
        prompts,
        step=step,
        seed=config.train.seed,
        prompts_per_step=config.rollout.prompts_per_step,
        group_size=config.rollout.group_size,
    )


def build_evaluation_batches(
    config: Config, held_out: PromptSource, processes: Processes = ALONE
) -> list[PromptBatch]:
    """This process's held-out prompts, with the seeds of every evaluation, in batches of a step."""
    images = config.rollout.prompts_per_step * config.rollout.group_size // processes.count
    return evaluation_batches(
        held_out,
        processes.part(len(held_out)),
        prompts_per_batch=evaluated_at_once(images, config.eval.samples_per_prompt),
        samples_per_prompt=config.eval.samples_per_prompt,
        seed=config.eval.seed,
    )


def collect_settings(config: Config) -> CollectSettings:
    """Plain values for collecting experience."""
    return CollectSettings(
        combine=config.reward.combine,
        advantage=config.advantage,
        loss=config.loss,
        micro_batch_size=config.train.micro_batch_size,
        decode_steps=config.decode.rollout_steps or config.decode.steps,
        refill_rounds=config.rollout.refill_rounds,
        steering=config.reward.steering(),
    )


def update_settings(config: Config) -> UpdateSettings:
    """Plain values for learning from experience."""
    return UpdateSettings(
        loss=config.loss,
        max_grad_norm=config.optim.max_grad_norm,
        micro_batch_size=config.train.micro_batch_size,
        updates_per_rollout=config.train.updates_per_rollout,
        minibatches_per_rollout=config.train.minibatches_per_rollout,
        is_skipping_flat=config.train.skip_flat,
    )


def loop_settings(config: Config) -> LoopSettings:
    """Plain values for the loop."""
    return LoopSettings(
        steps=config.train.steps,
        eval_every=config.train.eval_every,
        checkpoint_every=config.train.checkpoint_every,
        update=update_settings(config),
        advantage=config.advantage,
        anchor=config.anchor,
        steering=config.reward.steering(),
        is_stopping_on_hacking=config.reward.on_hacking == "stop",
        reference_sync_every=config.loss.reference_sync_every if config.needs_reference else None,
    )


@dataclass(frozen=True)
class Launch:
    """The processes of a run.

    Attributes:
        processes: What they agree through.
        cluster: In which collectors run; None where this process collects.
    """

    accelerator: Accelerator
    processes: Processes
    cluster: RayCluster | None = None


def build_trainer(
    config: Config,
    models: Models,
    prompts: Prompts,
    opened: OpenedRun,
    launch: Launch,
    console: Console,
) -> Trainer:
    """Optimizer, schedule, records and loop, with the state of the checkpoint if there is one."""
    checkpoint, processes = opened.checkpoint, launch.processes
    if has_shards(launch.accelerator) and launch.accelerator.mixed_precision != "no":
        # As the engine would, but before a checkpoint's weights lose what bf16 cannot hold.
        for weight in models.policy.trainable_parameters():
            weight.data = weight.data.float()
    if checkpoint is not None:
        # Before an engine cuts them up.
        with checkpoint.named():
            models.policy.load_state_tensors(checkpoint.of("policy"))
            models.policy.load_reference_tensors(checkpoint.tensors.get("reference", {}))
    with models.offload.phase("update"):
        strategy = AccelerateStrategy(models.policy, launch.accelerator, processes)
        optimizer = _build_optimizer(config, models.policy)
    learning_rate = _build_learning_rate(config, optimizer)
    device = launch.accelerator.device
    if config.offload == "modules_and_optimizer" and device.type != "cpu":
        models.offload.add("optimizer", OptimizerPart(optimizer, device=device))
    state = RunState()
    if checkpoint is not None:
        state = _restore(checkpoint, optimizer, learning_rate)
        state.best_total = _comparable_best(config, opened.folder, state)
        if models.offload.moves("optimizer"):
            # Its moments came back to where the weights are, and wait in CPU memory.
            OptimizerPart(optimizer, device=device).evict()
    state.start_step = start_step(config)
    recheck = Recheck(
        models,
        collect_settings(config),
        RecheckSettings(
            every=config.decode.recheck_every,
            groups=config.decode.recheck_groups,
            min_rank_correlation=config.decode.min_rank_correlation,
        ),
        state,
        processes,
    )
    batch_for_step = partial(build_batch, config, prompts.training)
    source: ExperienceSource | TargetSource = SynchronousSource(
        models,
        strategy,
        processes,
        batch_for_step=batch_for_step,
        settings_for_step=lambda step: replace(
            recheck.collect_settings(step), moving_weights=state.moving_weights
        ),
        updates=lambda: learning_rate.updates,
        spares_for_step=partial(build_spares, config, prompts.training)
        if config.rollout.refill_rounds
        else None,
    )
    if config.train.method == "sft":
        preview = config.anchor.preview
        source = TargetSource(models, processes, batch_for_step=batch_for_step, preview=preview)
    average = None
    if config.eval.ema_decay is not None:
        average = MovingAverage(models.policy, config.eval.ema_decay)
        if checkpoint is not None:
            average.load(checkpoint.of("average"))
    folder = opened.folder
    evaluation_batches = build_evaluation_batches(config, prompts.held_out, processes)
    recorder = RunRecorder(
        folder,
        processes,
        lambda: _open_files(config, folder, state),
        combine=config.reward.combine,
    )
    progress = Progress(
        total=config.train.steps,
        done=state.step,
        console=console,
        eval_every=config.train.eval_every,
        checkpoint_every=config.train.checkpoint_every,
        untrained=next(iter(read_metrics(folder)), None),
    )
    saver = CheckpointSaver(
        folder,
        state,
        optimizer=optimizer,
        learning_rate=learning_rate,
        strategy=strategy,
        processes=processes,
        keep=config.train.keep_checkpoints,
        announce=progress.phase,
        average=average,
    )
    # Last: collectors begin to work, and the trainer ends them.
    if launch.cluster is not None:
        source = build_asynchronous_source(
            config,
            models,
            batch_for_step,
            recheck,
            launch.cluster,
            first_step=state.step + 1,
        )
    return Trainer(
        models,
        optimizer,
        learning_rate,
        source=source,
        recheck=recheck,
        evaluation_batches=evaluation_batches,
        settings=loop_settings(config),
        state=state,
        recorder=recorder,
        saver=saver,
        progress=progress,
        strategy=strategy,
        processes=processes,
        average=average,
    )


def _build_optimizer(config: Config, policy: Policy) -> AdamW:
    return AdamW(
        policy.trainable_parameters(),
        lr=config.optim.learning_rate,
        betas=config.optim.betas,
        eps=config.optim.epsilon,
        weight_decay=config.optim.weight_decay,
    )


def _build_learning_rate(config: Config, optimizer: Optimizer) -> LearningRate:
    updates = config.train.updates_per_step
    return LearningRate(
        optimizer,
        peak=config.optim.learning_rate,
        schedule=config.optim.schedule,
        warmup_updates=config.optim.warmup_steps * updates,
        total_updates=config.train.steps * updates,
    )


def _open_files(config: Config, folder: RunFolder, at: RunState) -> tuple[Recorder, HackingMonitor]:
    """What writes the run folder, cut to the step it goes on from, and what watches for gaming."""
    recorder = Recorder(
        folder,
        trackers=config.trackers,
        config=config.model_dump(mode="json"),
        # A run that goes on keeps the name that it began with.
        about=read_config(folder).run,
        combine=config.reward.combine,
    )
    # First: a checkpoint whose records are gone could not be gone on from.
    forget_checkpoints_after(folder, at.step)
    # A run that has finished no step makes its evaluation of step 0 anew.
    recorder.truncate_after(at.step if at.step > 0 else -1)
    # A kill may have come between the checkpoint and the removal of those no longer kept.
    prune_checkpoints(folder, config.train.keep_checkpoints, at.best_step)
    return recorder, HackingMonitor(
        folder,
        watch=config.reward.watch,
        evaluated=[name for name, term in config.reward.terms.items() if term.when == "evaluation"],
        margin=config.reward.canary_margin,
    )


def _restore(checkpoint: Checkpoint, optimizer: Optimizer, learning_rate: LearningRate) -> RunState:
    """Puts a checkpoint's state, save the weights, back into the objects of a run."""
    state = checkpoint.run_state()
    with checkpoint.named():
        load_optimizer(optimizer, checkpoint.of("optimizer"), state.optimizer.model_dump())
    learning_rate.set(state.updates)
    return RunState(
        step=checkpoint.step,
        best_step=state.best_step,
        best_total=-torch.inf if state.best_total is None else state.best_total,
        skipped_in_a_row=state.skipped_in_a_row,
        full_decode_from=state.full_decode_from,
        moving_weights=None
        if state.moving_weights is None
        else MovingWeights(**state.moving_weights.model_dump()),
    )


def _comparable_best(config: Config, folder: RunFolder, at: RunState) -> float:
    """The best total so far, on the scale that later evaluations have.

    Checkpoints may have been written when `normalize_then_sum` totals of evaluations were relative
    to their group.
    """
    if at.best_step is None or config.reward.combine == "weighted_sum":
        return at.best_total
    if not folder.evaluation_path(at.best_step).exists():
        return at.best_total
    totals = read_evaluation(folder, at.best_step)["total"].to_numpy()
    return torch.tensor(totals).mean().item()


def collector_needs(config: Config) -> Needs:
    """What the collectors of an asynchronous run take."""
    section = config.asynchronous
    return Needs(section.collectors, section.cpus_per_collector, section.gpus_per_collector)


def build_collector_models(config: Config) -> Models:
    """The models of a collector, on the accelerator that is kept for it, or on the CPU.

    Raises:
        GlmGrpoError, RewardError: Something cannot be loaded.
    """
    # Ray hides no accelerator from a process that asked for none.
    has_accelerator = config.asynchronous.gpus_per_collector > 0
    device = Accelerator().device if has_accelerator else torch.device("cpu")
    start = find_start(config)
    models = load_models(config, device, needs_reference=config.needs_reference)
    begin_with(models, start)
    return models


def build_asynchronous_source(
    config: Config,
    models: Models,
    batch_for_step: BatchForStep,
    recheck: Recheck,
    cluster: RayCluster,
    *,
    first_step: int,
) -> AsynchronousSource:
    """Starts the collectors.

    Args:
        models: The learner's.
        batch_for_step: The prompts of a step, from 0.
        recheck: Says how the pictures of a step are decoded.
        cluster: In which the collectors run.
        first_step: The next to be learned, from 1.
    """
    # Ray need not be installed for anything else, and the cluster has set it up by now.
    from glm_grpo.training.asynchronous.ray_pool import RayPool  # noqa: PLC0415

    settings = CollectorSettings(
        make_models=partial(build_collector_models, config),
        threads=config.asynchronous.cpus_per_collector,
        folder=str(Path.cwd()),
    )
    pool = RayPool(cluster, collector_needs(config), settings)
    recipe = _recipe(config, batch_for_step, recheck, first_step=first_step)
    return AsynchronousSource(pool, recipe, models)


def _recipe(
    config: Config, batch_for_step: BatchForStep, recheck: Recheck, *, first_step: int
) -> Recipe:
    section = config.asynchronous
    return Recipe(
        batch_for_step=batch_for_step,
        settings_for_step=recheck.collect_settings,
        steps=Steps(
            first=first_step,
            last=config.train.steps,
            updates_each=config.train.updates_per_step,
            max_age=section.max_policy_age,
            collectors=section.collectors,
        ),
        push_every=section.push_every,
        stale=StaleSettings(
            treatment=section.on_stale,
            max_importance_ratio=section.max_importance_ratio,
            min_importance_ratio=section.min_importance_ratio or 0.0,
            micro_batch_size=config.train.micro_batch_size,
        ),
    )
