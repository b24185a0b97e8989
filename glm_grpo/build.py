"""Config -> objects. The only place that constructs; everything else receives values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from diffusers import GlmImagePipeline
from rich.console import Console
from torch.optim import AdamW, Optimizer

from glm_grpo.config import Config
from glm_grpo.glm_image.decoder import Decoder
from glm_grpo.glm_image.loading import DTYPES, load_pipeline
from glm_grpo.glm_image.policy import Policy
from glm_grpo.glm_image.quantization import Quantization, refuse_without_accelerator
from glm_grpo.glm_image.residency import ModulePart, Movable, OptimizerPart, Residency
from glm_grpo.glm_image.sampling import Truncation
from glm_grpo.grpo.update import UpdateSettings
from glm_grpo.seeds import derive_seed
from glm_grpo.storage import RunFolder
from glm_grpo.tables import read_metrics
from glm_grpo.tiny.prompts import tiny_prompts
from glm_grpo.training.asynchronous import AsynchronousSource, Recipe
from glm_grpo.training.checkpoint import (
    Checkpoint,
    forget_checkpoints_after,
    prune_checkpoints,
)
from glm_grpo.training.collect import CollectSettings, Stage
from glm_grpo.training.engine import Engine, TrainingEngine, has_shards
from glm_grpo.training.learning_rate import LearningRate
from glm_grpo.training.ledger import Steps
from glm_grpo.training.loop import Trainer
from glm_grpo.training.optimizer_state import load_optimizer
from glm_grpo.training.out_of_memory import out_of_memory_explained
from glm_grpo.training.progress import Progress
from glm_grpo.training.progression import LoopSettings, Progression
from glm_grpo.training.prompts import (
    PromptSource,
    batch_for_step,
    evaluated_at_once,
    evaluation_batches,
    load_prompts,
)
from glm_grpo.training.ray_cluster import Needs, RayCluster
from glm_grpo.training.ray_collector import CollectorSettings
from glm_grpo.training.recheck import Recheck, RecheckSettings
from glm_grpo.training.recorder import Recorder
from glm_grpo.training.records import Records
from glm_grpo.training.resume import OpenedRun
from glm_grpo.training.sentinel import Sentinel
from glm_grpo.training.sources import ExperienceSource, SynchronousSource
from glm_grpo.training.stale import StaleSettings
from glm_grpo.training.team import ALONE, OnMain, Team
from glm_grpo.types import PromptBatch
from rewards.build import build_scorer

TINY = "tiny"
"""Value of `model.path` for the model shipped with the package, and prefix of its prompt sets."""


BatchForStep = Callable[[int], PromptBatch]


@dataclass(frozen=True)
class Prompts:
    """The two prompt sets of a run."""

    training: PromptSource
    held_out: PromptSource


def build_prompts(config: Config) -> Prompts:
    """Loads and checks both prompt sets; raises DataError before anything expensive starts."""
    return Prompts(
        training=build_prompt_set(config.data.path, config),
        held_out=build_prompt_set(config.data.eval_path, config),
    )


def build_stage(
    config: Config, device: torch.device, *, needs_reference: bool, is_sharded: bool = False
) -> Stage:
    """Loads all models and puts them where they belong.

    Args:
        config: Of the run.
        device: Of this process.
        needs_reference: Whether a KL to the untrained policy is weighed.
        is_sharded: Whether the engine places the policy's weights, cut over processes.

    Raises:
        ConfigError: Weights of 4 bits are asked for where there is no accelerator.
        ModelError: The model cannot be loaded.
    """
    refuse_without_accelerator(config.model.quantization, is_on_accelerator=device.type != "cpu")
    pipeline = load_pipeline(
        model_path(config.model.path),
        dtype=DTYPES[config.model.dtype],
        quantization=Quantization(
            language=config.model.quantization, decoder=config.decode.quantization
        ),
    )
    return place_models(
        config, pipeline, device, needs_reference=needs_reference, is_sharded=is_sharded
    )


def place_models(
    config: Config,
    pipeline: GlmImagePipeline,
    device: torch.device,
    *,
    needs_reference: bool,
    is_sharded: bool = False,
) -> Stage:
    """Puts the parts of a loaded pipeline, and the reward terms, where they belong.

    Arguments as in `build_stage`.
    """
    policy = build_policy(config, pipeline, needs_reference=needs_reference)
    decoder = Decoder(
        pipeline,
        steps=config.decode.steps,
        guidance_scale=config.decode.guidance_scale,
        batch_size=config.decode.batch_size,
    )
    is_offloading = config.offload != "none" and device.type != "cpu"
    scorer = build_scorer(
        config.reward,
        torch.device("cpu") if is_offloading else device,
        process_device=device,
    )
    modules = {
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
    return Stage(policy=policy, decoder=decoder, scorer=scorer, residency=Residency(parts))


def build_policy(config: Config, pipeline: GlmImagePipeline, *, needs_reference: bool) -> Policy:
    """The policy on the parts of a loaded pipeline."""
    adapter = config.model.adapter
    return Policy(
        pipeline,
        temperature=config.rollout.temperature,
        adapter_rank=None if adapter is None else adapter.rank,
        adapter_alpha=0.0 if adapter is None else adapter.alpha,
        is_checkpointing=config.model.gradient_checkpointing,
        needs_reference=needs_reference,
        seed=derive_seed(config.train.seed, "adapter"),
    )


def build_evaluation_batches(
    config: Config, held_out: PromptSource, team: Team = ALONE
) -> list[PromptBatch]:
    """This process's held-out prompts, with the seeds of every evaluation, in batches of a step."""
    images = config.rollout.prompts_per_step * config.rollout.group_size // team.size
    return evaluation_batches(
        held_out,
        team.part(len(held_out)),
        prompts_per_batch=evaluated_at_once(images, config.eval.samples_per_prompt),
        samples_per_prompt=config.eval.samples_per_prompt,
        seed=config.eval.seed,
    )


def collect_settings(config: Config) -> CollectSettings:
    """Plain values for collecting experience."""
    return CollectSettings(
        truncation=Truncation(top_k=config.rollout.top_k, top_p=config.rollout.top_p),
        combine=config.reward.combine,
        normalization=config.advantage.normalization,
        std_floor=config.advantage.std_floor,
        advantage_clip=config.advantage.clip,
        needs_reference=config.loss.kl_coef > 0,
        reward_kl_coef=config.loss.kl_coef if config.loss.kl_placement == "reward" else 0.0,
        micro_batch_size=config.train.micro_batch_size,
        decode_steps=config.decode.rollout_steps or config.decode.steps,
    )


def update_settings(config: Config) -> UpdateSettings:
    """Plain values for learning from experience."""
    return UpdateSettings(
        clip_low=config.loss.clip_low,
        clip_high=config.loss.clip_high,
        kl_coef=config.loss.kl_coef,
        kl_behaviour_coef=config.loss.kl_behaviour_coef,
        kl_estimator=config.loss.kl_estimator,
        is_kl_in_reward=config.loss.kl_placement == "reward",
        max_grad_norm=config.optim.max_grad_norm,
        micro_batch_size=config.train.micro_batch_size,
        updates_per_rollout=config.train.updates_per_rollout,
    )


def model_path(path: str) -> str:
    """A folder or hub id; `tiny` becomes the folder inside the package."""
    return str(files("glm_grpo.tiny") / "weights" / "pipeline") if path == TINY else path


@dataclass(frozen=True)
class Launch:
    """The processes of a run.

    Attributes:
        accelerator: Of this process.
        team: What they agree through.
        cluster: In which collectors run; None where this process collects.
    """

    accelerator: Accelerator
    team: Team
    cluster: RayCluster | None = None


def build_trainer(
    config: Config,
    stage: Stage,
    prompts: Prompts,
    opened: OpenedRun,
    launch: Launch,
    console: Console,
) -> Trainer:
    """Optimizer, schedule, records and loop, with the state of the checkpoint if there is one."""
    checkpoint, team = opened.checkpoint, launch.team
    if has_shards(launch.accelerator) and launch.accelerator.mixed_precision != "no":
        # As the engine would, but before a checkpoint's weights lose what bf16 cannot hold.
        for weight in stage.policy.trainable_parameters():
            weight.data = weight.data.float()
    if checkpoint is not None:
        # Before an engine cuts them up.
        stage.policy.load_state_tensors(checkpoint.tensors["policy"])
    with stage.residency.phase("update"):
        engine = build_engine(stage.policy, launch)
        optimizer = engine.prepare(_build_optimizer(config, stage.policy))
    learning_rate = _build_learning_rate(config, optimizer)
    device = launch.accelerator.device
    if config.offload == "modules_and_optimizer" and device.type != "cpu":
        stage.residency.add("optimizer", OptimizerPart(optimizer, device=device))
    progression = Progression()
    if checkpoint is not None:
        progression = _restore(checkpoint, optimizer, learning_rate)
        if config.offload == "modules":
            # Its moments came back to where the weights wait, and are needed where these work.
            OptimizerPart(optimizer, device=device).load()
    recheck = Recheck(
        stage,
        collect_settings(config),
        RecheckSettings(
            every=config.decode.recheck_every,
            groups=config.decode.recheck_groups,
            min_rank_correlation=config.decode.min_rank_correlation,
        ),
        progression,
        team,
    )
    batch_for_step = partial(build_batch, config, prompts.training)
    source: ExperienceSource = SynchronousSource(
        stage,
        engine,
        team,
        batch_for_step=batch_for_step,
        settings_for_step=recheck.collect_settings,
        updates=lambda: learning_rate.updates,
    )
    if launch.cluster is not None:
        recipe = _recipe(config, batch_for_step, recheck, first_step=progression.step + 1)
        source = _asynchronous_source(config, stage, recipe, launch.cluster)
    return Trainer(
        stage,
        optimizer,
        learning_rate,
        source=source,
        evaluation_batches=build_evaluation_batches(config, prompts.held_out, team),
        settings=_loop_settings(config),
        folder=opened.folder,
        records=OnMain(team, lambda: _open_records(config, opened.folder, progression)),
        recheck=recheck,
        progress=Progress(
            total=config.train.steps,
            done=progression.step,
            console=console,
            untrained=next(iter(read_metrics(opened.folder)), None),
        ),
        progression=progression,
        engine=engine,
        team=team,
    )


def collector_needs(config: Config) -> Needs:
    """What the collectors of an asynchronous run take."""
    section = config.asynchronous
    return Needs(section.collectors, section.cpus_per_collector, section.gpus_per_collector)


def build_collector_stage(config: Config) -> Stage:
    """The models of a collector, on the accelerator that its process sees, or on the CPU.

    Raises:
        GlmGrpoError, RewardError: Something cannot be loaded.
    """
    with out_of_memory_explained("loading", f"{config.model.path} in {config.model.dtype}"):
        return build_stage(config, Accelerator().device, needs_reference=config.loss.kl_coef > 0)


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
            updates_each=config.train.updates_per_rollout,
            max_age=section.max_policy_age,
            collectors=section.collectors,
        ),
        push_every=section.push_every,
        stale=StaleSettings(
            treatment=section.on_stale,
            max_importance_ratio=section.max_importance_ratio,
            micro_batch_size=config.train.micro_batch_size,
        ),
    )


def _asynchronous_source(
    config: Config, stage: Stage, recipe: Recipe, cluster: RayCluster
) -> AsynchronousSource:
    # Ray need not be installed for anything else, and the cluster has set it up by now.
    from glm_grpo.training.ray_pool import RayPool  # noqa: PLC0415

    settings = CollectorSettings(
        make_stage=partial(build_collector_stage, config),
        threads=config.asynchronous.cpus_per_collector,
        folder=str(Path.cwd()),
    )
    pool = RayPool(cluster, collector_needs(config), settings)
    return AsynchronousSource(pool, recipe, stage)


def build_engine(policy: Policy, launch: Launch) -> TrainingEngine:
    """What joins the processes of a launch."""
    if launch.accelerator.distributed_type == DistributedType.DEEPSPEED:
        # DeepSpeed need not be installed for anything else.
        from glm_grpo.training.deepspeed_engine import ZeroEngine  # noqa: PLC0415

        return ZeroEngine(policy, launch.accelerator, launch.team)
    return Engine(policy, launch.accelerator, launch.team)


def _build_optimizer(config: Config, policy: Policy) -> AdamW:
    return AdamW(
        policy.trainable_parameters(),
        lr=config.optim.learning_rate,
        betas=config.optim.betas,
        eps=config.optim.epsilon,
        weight_decay=config.optim.weight_decay,
    )


def _build_learning_rate(config: Config, optimizer: Optimizer) -> LearningRate:
    updates = config.train.updates_per_rollout
    return LearningRate(
        optimizer,
        peak=config.optim.learning_rate,
        schedule=config.optim.schedule,
        warmup_updates=config.optim.warmup_steps * updates,
        total_updates=config.train.steps * updates,
    )


def _loop_settings(config: Config) -> LoopSettings:
    return LoopSettings(
        steps=config.train.steps,
        eval_every=config.train.eval_every,
        checkpoint_every=config.train.checkpoint_every,
        keep_checkpoints=config.train.keep_checkpoints,
        collect=collect_settings(config),
        update=update_settings(config),
        is_stopping_on_hacking=config.reward.on_hacking == "stop",
    )


def _open_records(config: Config, folder: RunFolder, at: Progression) -> Records:
    """The records of a run, without what was recorded after the step it goes on from."""
    recorder = Recorder(
        folder,
        trackers=config.trackers,
        config=config.model_dump(mode="json"),
        combine=config.reward.combine,
    )
    # A run that has finished no step makes its evaluation of step 0 anew.
    recorder.truncate_after(at.step if at.step > 0 else -1)
    forget_checkpoints_after(folder, at.step)
    # A kill may have come between the checkpoint and the removal of those no longer kept.
    prune_checkpoints(folder, config.train.keep_checkpoints, at.best_step)
    sentinel = Sentinel(folder, watch=config.reward.watch, margin=config.reward.canary_margin)
    return Records(folder, recorder, sentinel, combine=config.reward.combine)


def _restore(
    checkpoint: Checkpoint, optimizer: Optimizer, learning_rate: LearningRate
) -> Progression:
    """Puts a checkpoint's state, save the weights, back into the objects of a run."""
    metadata = checkpoint.metadata
    load_optimizer(optimizer, checkpoint.tensors["optimizer"], metadata["optimizer"])
    learning_rate.set(metadata["updates"])
    best_total = metadata["best_total"]
    return Progression(
        step=checkpoint.step,
        best_step=metadata["best_step"],
        best_total=-torch.inf if best_total is None else best_total,
        skipped_in_a_row=metadata["skipped_in_a_row"],
        full_decode_from=metadata["full_decode_from"],
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


def build_prompt_set(path: str, config: Config) -> PromptSource:
    """Prompts of a file, a folder, a hub data set, or of the embedded world (`tiny:...`)."""
    height, width = config.rollout.height, config.rollout.width
    if path.startswith(f"{TINY}:"):
        return tiny_prompts(path.removeprefix(f"{TINY}:"), height=height, width=width)
    return load_prompts(path, height=height, width=width)
