"""The least time a step of a config can take on a device."""

from __future__ import annotations

from glm_grpo.analysis.planned_sizes import batch_sizes, model_settings
from glm_grpo.config import Config
from glm_grpo.glm_image.floors import (
    DeviceSpeed,
    SequenceSizes,
    UpdateWork,
    decode_flops,
    rollout_floor,
    update_flops,
)
from glm_grpo.glm_image.meta_models import read_part_configs
from glm_grpo.glm_image.meta_work import decoder_work, language_work
from glm_grpo.report.memory_plan import MemoryPlan
from glm_grpo.report.step_floors import StepFloors


def step_floors(
    config: Config,
    path: str,
    *,
    prompt_tokens: int,
    plan: MemoryPlan,
    device: DeviceSpeed,
    processes: int = 1,
) -> StepFloors:
    """Floors by phase; reward terms have none, since what they do is their own.

    Args:
        config: Of the run.
        path: Folder of the model, or the published model's hub id.
        prompt_tokens: Of the longest prompt; all are taken to be as long.
        plan: Of the same config: says what offloading moves.
        device: Where it runs.
        processes: That share the prompts, each on such a device; what they send each other is not
            counted.

    Raises:
        ModelError: The model's configs are not at hand.
    """
    configs = read_part_configs(path)
    sizes = batch_sizes(config, prompt_tokens=prompt_tokens, processes=processes)
    language = language_work(configs, model_settings(config, is_on_accelerator=True))
    sequences = SequenceSizes(
        prompts=sizes.prompts,
        group_size=sizes.group_size,
        prompt_tokens=prompt_tokens,
        tokens=sizes.tokens,
    )
    decoding = decode_flops(
        decoder_work(configs, height=sizes.height, width=sizes.width),
        images=sizes.images,
        steps=config.decode.rollout_steps or config.decode.steps,
        guidance_scale=config.decode.guidance_scale,
    )
    learning = UpdateWork(
        updates=config.train.updates_per_rollout,
        is_full=config.model.adapter is None,
        is_checkpointing=config.model.gradient_checkpointing,
        needs_reference=config.loss.kl_coef > 0,
    )
    seconds = {
        "rollout": rollout_floor(language, sequences, device),
        "decode": decoding / device.flops,
        "update": update_flops(language, sequences, learning) / device.flops,
    }
    if plan.moved_in:
        seconds["offload"] = (plan.moved_in + plan.moved_out) / device.link
    return StepFloors(device=device.name, seconds=seconds)
