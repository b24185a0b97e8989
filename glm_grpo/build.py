"""Config -> objects. The only place that constructs; everything else receives values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Literal

import diffusers
import torch
import transformers
from accelerate import Accelerator
from diffusers import GlmImagePipeline
from rich.console import Console
from rich.table import Table
from torch.optim import AdamW

from glm_grpo.config import Config
from glm_grpo.errors import ConfigError, StorageError
from glm_grpo.glm_image.decoder import Decoder
from glm_grpo.glm_image.export import export_adapter, export_pipeline
from glm_grpo.glm_image.loading import DTYPES, load_pipeline
from glm_grpo.glm_image.policy import Policy
from glm_grpo.glm_image.residency import ModulePart, Movable, OptimizerPart, Residency
from glm_grpo.glm_image.sampling import Truncation
from glm_grpo.glm_image.self_check import self_check
from glm_grpo.grpo.update import UpdateSettings
from glm_grpo.report.summary import SummaryRow
from glm_grpo.seeds import derive_seed
from glm_grpo.storage import storage_errors
from glm_grpo.tiny.prompts import tiny_prompts
from glm_grpo.training.checkpoint import Checkpoint, forget_checkpoints_after
from glm_grpo.training.clock import PhaseClock
from glm_grpo.training.collect import CollectSettings, Stage, collect
from glm_grpo.training.evaluate import compare_evaluations, evaluate
from glm_grpo.training.learning_rate import LearningRate
from glm_grpo.training.loop import LoopSettings, Progression, Trainer
from glm_grpo.training.optimizer_state import load_optimizer
from glm_grpo.training.progress import Progress
from glm_grpo.training.prompts import PromptSource, batch_for_step, evaluation_batches, load_prompts
from glm_grpo.training.recorder import Recorder
from glm_grpo.training.resume import OpenedRun, find_checkpoint, open_run
from glm_grpo.types import PromptBatch
from rewards.build import build_scorer

TINY = "tiny"
"""Value of `model.path` for the model shipped with the package, and prefix of its prompt sets."""


@dataclass(frozen=True)
class Prompts:
    """The two prompt sets of a run."""

    training: PromptSource
    held_out: PromptSource


def run_training(config: Config) -> int:
    """Trains as the config says; prints before against after.

    Returns:
        Exit code: 0, also when the run was asked to stop and saved.
    """
    accelerator = Accelerator()
    if accelerator.num_processes > 1:
        raise ConfigError(
            f"the run was started on {accelerator.num_processes} processes; this version trains "
            "on one; start it with `python train.py`"
        )
    prompts = build_prompts(config)
    opened = open_run(config)
    console = Console(stderr=True)
    if not console.is_terminal:
        # Their bars redraw a line with control characters; a log has none.
        diffusers.utils.logging.disable_progress_bar()
        transformers.utils.logging.disable_progress_bar()
    stage = build_stage(config, accelerator.device, needs_reference=config.loss.kl_coef > 0)
    for prompt_set in (prompts.training, prompts.held_out):
        stage.scorer.check_prompts(prompt_set[index] for index in range(len(prompt_set)))
    trainer = build_trainer(config, stage, prompts, opened, accelerator, console)
    summary = trainer.run()
    if summary is None:
        console.print(
            f"stopped and saved; go on with train.resume={opened.folder.path}", soft_wrap=True
        )
    else:
        Console().print(summary_table(summary, title="held-out prompts, before and after"))
    Console().print(f"gallery: {opened.folder.gallery_path}", soft_wrap=True)
    return 0


def check_config(config: Config) -> Iterator[str]:
    """Everything that can be checked before a run, cheapest first; yields what was found.

    Raises:
        GlmGrpoError, RewardError: The first check that fails.
    """
    yield "config: every key is known and in range"
    prompts = build_prompts(config)
    yield f"data: {len(prompts.training)} training and {len(prompts.held_out)} held-out prompts"
    # Adapters start as no change, and no reference is run here.
    stage = build_stage(config, Accelerator().device, needs_reference=False)
    yield f"model: loaded {config.model.path} in {config.model.dtype}"
    for prompt_set in (prompts.training, prompts.held_out):
        stage.scorer.check_prompts(prompt_set[index] for index in range(len(prompt_set)))
    yield f"reward: {', '.join(stage.scorer.names)}; every prompt has a term that applies"
    experience = collect(
        stage,
        _batch(config, prompts.training, 0),
        collect_settings(config),
        policy_step=0,
        clock=PhaseClock(lambda _: None),
    )
    means = zip(stage.scorer.names, experience.rewards.raw.mean(dim=(0, 1)).tolist(), strict=True)
    yield f"one rollout: {', '.join(f'{name} {mean:.3f}' for name, mean in means)}"
    with stage.residency.phase("update"):
        report = self_check(stage.policy, experience, rows=config.train.micro_batch_size)
    yield (
        f"self-check: full grids, replay gap {report.mean_gap:.1e} nats a token (largest "
        f"{report.max_gap:.1e}), mean ratio {report.mean_ratio:.6f}"
    )


def evaluate_run(run: Path) -> tuple[int, list[SummaryRow]]:
    """Evaluates a run's newest checkpoint, or the one the path names, against its start.

    Nothing is written into the run.

    Returns:
        The step of the checkpoint, and before against after.

    Raises:
        CheckpointError: The path holds no run or no whole checkpoint.
    """
    found = find_checkpoint(run)
    config = found.config
    stage = build_stage(config, Accelerator().device, needs_reference=False)
    batches = build_evaluation_batches(config, _prompt_set(config.data.eval_path, config))
    settings = collect_settings(config)
    before = evaluate(stage, batches, settings, step=0)
    stage.policy.load_state_tensors(found.checkpoint.tensors["policy"])
    after = evaluate(stage, batches, settings, step=found.checkpoint.step)
    return found.checkpoint.step, compare_evaluations(before, after)


def export_run(run: Path, directory: Path, *, kind: Literal["adapter", "pipeline"] | None) -> str:
    """Writes the weights of a run's newest checkpoint, or of the one the path names.

    Returns:
        A line that says what was written and how to load it.

    Raises:
        CheckpointError: The path holds no run or no whole checkpoint.
        StorageError: The folder is not empty, or cannot be written.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise StorageError(
            f"{directory} is not an empty folder; nothing is overwritten; name another"
        )
    found = find_checkpoint(run)
    config = found.config
    pipeline = load_pipeline(model_path(config.model.path), dtype=DTYPES[config.model.dtype])
    policy = build_policy(config, pipeline, needs_reference=False)
    policy.load_state_tensors(found.checkpoint.tensors["policy"])
    kind = kind or ("pipeline" if config.model.adapter is None else "adapter")
    with storage_errors("write", directory):
        if kind == "adapter":
            export_adapter(policy, directory)
            return f"{directory}: step {found.checkpoint.step}; PeftModel.from_pretrained loads it"
        export_pipeline(policy, pipeline, directory)
    return f"{directory}: step {found.checkpoint.step}; GlmImagePipeline.from_pretrained loads it"


def build_prompts(config: Config) -> Prompts:
    """Loads and checks both prompt sets; raises DataError before anything expensive starts."""
    return Prompts(
        training=_prompt_set(config.data.path, config),
        held_out=_prompt_set(config.data.eval_path, config),
    )


def build_stage(config: Config, device: torch.device, *, needs_reference: bool) -> Stage:
    """Loads all models and puts them where they belong."""
    pipeline = load_pipeline(model_path(config.model.path), dtype=DTYPES[config.model.dtype])
    policy = build_policy(config, pipeline, needs_reference=needs_reference)
    decoder = Decoder(
        pipeline, steps=config.decode.steps, guidance_scale=config.decode.guidance_scale
    )
    is_offloading = config.offload != "none" and device.type != "cpu"
    scorer = build_scorer(config.reward, torch.device("cpu") if is_offloading else device)
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


def summary_table(rows: Sequence[SummaryRow], *, title: str) -> Table:
    """Before and after on the held-out prompts, for the terminal."""
    table = Table(title=title)
    for name in ("", "before", "after", "change", "95 % interval"):
        table.add_column(name, justify="left" if name == "" else "right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.before:.3f}",
            f"{row.after:.3f}",
            f"{row.difference:+.3f}",
            f"[{row.low:+.3f}, {row.high:+.3f}]",
            style="bold" if row.name == "total" else None,
        )
    return table


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
        batch_for_step=partial(_batch, config, prompts.training),
        evaluation_batches=build_evaluation_batches(config, prompts.held_out),
        settings=LoopSettings(
            steps=config.train.steps,
            eval_every=config.train.eval_every,
            checkpoint_every=config.train.checkpoint_every,
            keep_checkpoints=config.train.keep_checkpoints,
            collect=collect_settings(config),
            update=_update_settings(config),
        ),
        folder=opened.folder,
        recorder=recorder,
        progress=Progress(total=config.train.steps, done=progression.step, console=console),
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


def _batch(config: Config, prompts: PromptSource, step: int) -> PromptBatch:
    return batch_for_step(
        prompts,
        step=step,
        seed=config.train.seed,
        prompts_per_step=config.rollout.prompts_per_step,
        group_size=config.rollout.group_size,
    )


def _prompt_set(path: str, config: Config) -> PromptSource:
    height, width = config.rollout.height, config.rollout.width
    if path.startswith(f"{TINY}:"):
        return tiny_prompts(path.removeprefix(f"{TINY}:"), height=height, width=width)
    return load_prompts(path, height=height, width=width)
