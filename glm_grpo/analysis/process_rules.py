"""Which configs several processes can run."""

from __future__ import annotations

from glm_grpo.config import Config
from glm_grpo.errors import ConfigError
from glm_grpo.glm_image.shards import Processes


def refuse_for_processes(config: Config, processes: Processes) -> None:
    """Refuses what so many processes, or shards, cannot run.

    Raises:
        ConfigError: Names the key and what to change.
    """
    if config.rollout.prompts_per_step < processes.count:
        raise ConfigError(
            f"rollout.prompts_per_step is {config.rollout.prompts_per_step}: each of the "
            f"{processes.count} processes samples other prompts of a step, and needs one at least; "
            f"raise it to {processes.count} or more, or start fewer processes"
        )
    is_kept_in_fp32 = processes.is_sharded and processes.is_mixed
    if config.model.adapter is None and config.model.dtype == "bfloat16" and not is_kept_in_fp32:
        raise ConfigError(
            "model.dtype is bfloat16 and model.adapter null: a weight in bfloat16 keeps 8 bits, "
            "and updates as small as those of fine-tuning round to no change at all; start several "
            "processes with configs/accelerate/fsdp2.yaml, which keeps weights in float32, or set "
            "'model.adapter={rank: 32, alpha: 64.0}' (adapters are float32) or model.dtype=float32"
        )
    if not processes.is_sharded:
        return
    if config.model.quantization is not None:
        raise ConfigError(
            f"model.quantization is {config.model.quantization}: such weights cannot be cut up; "
            "leave it null, or start with configs/accelerate/ddp.yaml, which copies them"
        )
