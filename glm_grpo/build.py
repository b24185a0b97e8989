"""Config -> objects. The only place that constructs; everything else receives values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib.resources import files

import torch
from accelerate import Accelerator
from diffusers import GlmImagePipeline
from rich.console import Console
from torch.optim import AdamW

from glm_grpo.config import Config
from glm_grpo.glm_image.decoder import Decoder
from glm_grpo.glm_image.loading import DTYPES, load_pipeline
from glm_grpo.glm_image.policy import Policy
from glm_grpo.glm_image.residency import ModulePart, Movable, OptimizerPart, Residency
from glm_grpo.glm_image.sampling import Truncation
from glm_grpo.grpo.update import UpdateSettings
from glm_grpo.seeds import derive_seed
from glm_grpo.tables import read_metrics
from glm_grpo.tiny.prompts import tiny_prompts
from glm_grpo.training.checkpoint import Checkpoint, forget_checkpoints_after
from glm_grpo.training.collect import CollectSettings, Stage
from glm_grpo.training.learning_rate import LearningRate
from glm_grpo.training.loop import Trainer
from glm_grpo.training.optimizer_state import load_optimizer
from glm_grpo.training.progress import Progress
from glm_grpo.training.progression import LoopSettings, Progression
from glm_grpo.training.prompts import PromptSource, batch_for_step, evaluation_batches, load_prompts
from glm_grpo.training.recorder import Recorder
from glm_grpo.training.resume import OpenedRun
from glm_grpo.training.sentinel import Sentinel
from glm_grpo.types import PromptBatch
from rewards.build import build_scorer

TINY = "tiny"
"""Value of `model.path` for the model shipped with the package, and prefix of its prompt sets."""


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


def build_stage(config: Config, device: torch.device, *, needs_reference: bool) -> Stage:
    """Loads all models and puts them where they belong."""
    pipeline = load_pipeline(model_path(config.model.path), dtype=DTYPES[config.model.dtype])
    policy = build_policy(config, pipeline, needs_reference=needs_reference)
    decoder = Decoder(
        pipeline, steps=config.decode.steps, guidance_scale=config.decode.guidance_scale
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


def build_evaluation_batches(config: Config, held_out: PromptSource) -> list[PromptBatch]:
    """All held-out prompts, with the seeds every evaluation uses, in batches of a step's size."""
    images = config.rollout.prompts_per_step * config.rollout.group_size
    return evaluation_batches(
        held_out,
        prompts_per_batch=max(1, images // config.eval.samples_per_prompt),
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
        reward_kl_coef=config.loss.kl_coef if config.loss.kl_placement == "reward" else 0.0,
        micro_batch_size=config.train.micro_batch_size,
    )


def model_path(path: str) -> str:
    """A folder or hub id; `tiny` becomes the folder inside the package."""
    return str(files("glm_grpo.tiny") / "weights" / "pipeline") if path == TINY else path


def build_trainer(
    config: Config,
    stage: Stage,
    prompts: Prompts,
    opened: OpenedRun,
    accelerator: Accelerator,
    console: Console,
) -> Trainer:
    """Optimizer, schedule, recorder and loop, with the state of the checkpoint if there is one."""
    optimizer = AdamW(
        stage.policy.trainable_parameters(),
        lr=config.optim.learning_rate,
        betas=config.optim.betas,
        eps=config.optim.epsilon,
        weight_decay=config.optim.weight_decay,
    )
    updates = config.train.updates_per_rollout
    learning_rate = LearningRate(
        optimizer,
        peak=config.optim.learning_rate,
        schedule=config.optim.schedule,
        warmup_updates=config.optim.warmup_steps * updates,
        total_updates=config.train.steps * updates,
    )
    if config.offload == "modules_and_optimizer" and accelerator.device.type != "cpu":
        stage.residency.add("optimizer", OptimizerPart(optimizer, device=accelerator.device))
    recorder = Recorder(
        opened.folder,
        trackers=config.trackers,
        config=config.model_dump(mode="json"),
        combine=config.reward.combine,
    )
    progression = Progression()
    if opened.checkpoint is not None:
        progression = _restore(opened.checkpoint, stage.policy, optimizer, learning_rate)
    # A run that was killed before its first checkpoint forgets its evaluation of step 0 as well.
    recorder.truncate_after(progression.step if opened.checkpoint is not None else -1)
    forget_checkpoints_after(opened.folder, progression.step)
    return Trainer(
        stage,
        optimizer,
        learning_rate,
        batch_for_step=partial(build_batch, config, prompts.training),
        evaluation_batches=build_evaluation_batches(config, prompts.held_out),
        settings=LoopSettings(
            steps=config.train.steps,
            eval_every=config.train.eval_every,
            checkpoint_every=config.train.checkpoint_every,
            keep_checkpoints=config.train.keep_checkpoints,
            collect=collect_settings(config),
            update=_update_settings(config),
            is_stopping_on_hacking=config.reward.on_hacking == "stop",
        ),
        folder=opened.folder,
        recorder=recorder,
        sentinel=Sentinel(
            opened.folder, watch=config.reward.watch, margin=config.reward.canary_margin
        ),
        progress=Progress(
            total=config.train.steps,
            done=progression.step,
            console=console,
            untrained=next(iter(read_metrics(opened.folder)), None),
        ),
        progression=progression,
        backward=accelerator.backward,
    )


def _restore(
    checkpoint: Checkpoint, policy: Policy, optimizer: AdamW, learning_rate: LearningRate
) -> Progression:
    """Puts a checkpoint's state back into the objects of a run."""
    metadata = checkpoint.metadata
    policy.load_state_tensors(checkpoint.tensors["policy"])
    load_optimizer(optimizer, checkpoint.tensors["optimizer"], metadata["optimizer"])
    learning_rate.set(metadata["updates"])
    best_total = metadata["best_total"]
    return Progression(
        step=checkpoint.step,
        best_step=metadata["best_step"],
        best_total=-torch.inf if best_total is None else best_total,
        skipped_in_a_row=metadata["skipped_in_a_row"],
    )


def _update_settings(config: Config) -> UpdateSettings:
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
