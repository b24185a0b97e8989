"""Config -> models, prompts, plain values; only this and the `build_*` beside it construct."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

import torch
from diffusers import GlmImagePipeline

from glm_grpo.config import Config
from glm_grpo.grpo.losses import CustomLoss
from glm_grpo.grpo.update import UpdateSettings
from glm_grpo.models.glm_image.decoder import Decoder
from glm_grpo.models.glm_image.loading import DTYPES, check_model, load_pipeline
from glm_grpo.models.glm_image.model_folder import ReservedTokens
from glm_grpo.models.glm_image.offload import ModulePart, Movable, Residency
from glm_grpo.models.glm_image.policy import Policy
from glm_grpo.models.glm_image.quantization import Quantization, refuse_without_accelerator
from glm_grpo.models.glm_image.sampling import Truncation
from glm_grpo.seeds import derive_seed
from glm_grpo.tiny.prompts import tiny_prompts
from glm_grpo.training.checkpoint.run_state import LoopSettings
from glm_grpo.training.collect import CollectSettings, Stage
from glm_grpo.training.data.prompts import (
    PromptSource,
    batch_for_step,
    evaluated_at_once,
    evaluation_batches,
    load_prompts,
)
from glm_grpo.training.distributed.processes import ALONE, Team
from glm_grpo.training.out_of_memory import out_of_memory_explained
from glm_grpo.types import PromptBatch
from rewards.build import build_scorer

TINY = "tiny"
"""Value of `model.path` for the model shipped with the package, and prefix of its prompt sets."""


def model_path(path: str) -> str:
    """A folder or hub id; `tiny` becomes the folder inside the package."""
    return str(files("glm_grpo.tiny") / "weights" / "pipeline") if path == TINY else path


def load_stage(
    config: Config, device: torch.device, *, needs_reference: bool, is_sharded: bool = False
) -> Stage:
    """As `build_stage`; memory that runs out is explained.

    Raises:
        GlmGrpoError, RewardError: Something cannot be loaded.
    """
    with out_of_memory_explained("loading", f"{config.model.path} in {config.model.dtype}"):
        return build_stage(config, device, needs_reference=needs_reference, is_sharded=is_sharded)


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
        ConfigError: Weights of 4 bits are asked for where there is no accelerator, or the function
            of a custom loss cannot be imported.
        ModelError: The model cannot be loaded.
    """
    if isinstance(config.loss, CustomLoss):
        config.loss.load()
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


@dataclass(frozen=True)
class Prompts:
    """The two prompt sets of a run."""

    training: PromptSource
    held_out: PromptSource


def build_prompts(config: Config) -> Prompts:
    """Checks the model's files, then loads and checks both prompt sets.

    Raises:
        ModelError: The model's files cannot be used.
        DataError: A prompt cannot.
    """
    reserved = check_model(model_path(config.model.path))
    return Prompts(
        training=build_prompt_set(config.data.path, config, reserved),
        held_out=build_prompt_set(config.data.eval_path, config, reserved),
    )


def check_prompt_sets(stage: Stage, prompts: Prompts) -> list[str]:
    """Refuses prompts that no term can score; lines on terms that apply to few prompts.

    Raises:
        RewardError: See `Scorer.check_prompts`.
    """
    named = (("training prompts", prompts.training), ("held-out prompts", prompts.held_out))
    return [
        line
        for of, prompt_set in named
        for line in stage.scorer.check_prompts(
            (prompt_set[index] for index in range(len(prompt_set))), of=of
        )
    ]


def build_prompt_set(path: str, config: Config, reserved: ReservedTokens) -> PromptSource:
    """Prompts of a file, a folder, a hub data set, or of the embedded world (`tiny:...`).

    Args:
        path: Of the prompts.
        config: Of the run.
        reserved: What no prompt may hold.
    """
    height, width = config.rollout.height, config.rollout.width
    if path.startswith(f"{TINY}:"):
        return tiny_prompts(path.removeprefix(f"{TINY}:"), height=height, width=width)
    return load_prompts(path, height=height, width=width, reserved=reserved)


def build_batch(config: Config, prompts: PromptSource, step: int) -> PromptBatch:
    """The batch of a step, from 0."""
    return batch_for_step(
        prompts,
        step=step,
        seed=config.train.seed,
        prompts_per_step=config.rollout.prompts_per_step,
        group_size=config.rollout.group_size,
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
        advantage=config.advantage,
        loss=config.loss,
        micro_batch_size=config.train.micro_batch_size,
        decode_steps=config.decode.rollout_steps or config.decode.steps,
    )


def update_settings(config: Config) -> UpdateSettings:
    """Plain values for learning from experience."""
    return UpdateSettings(
        loss=config.loss,
        max_grad_norm=config.optim.max_grad_norm,
        micro_batch_size=config.train.micro_batch_size,
        updates_per_rollout=config.train.updates_per_rollout,
    )


def loop_settings(config: Config) -> LoopSettings:
    """Plain values for the loop."""
    return LoopSettings(
        steps=config.train.steps,
        eval_every=config.train.eval_every,
        checkpoint_every=config.train.checkpoint_every,
        keep_checkpoints=config.train.keep_checkpoints,
        collect=collect_settings(config),
        update=update_settings(config),
        is_stopping_on_hacking=config.reward.on_hacking == "stop",
    )
