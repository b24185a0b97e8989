"""What a launch through DeepSpeed must look like; needs no DeepSpeed."""

from __future__ import annotations

from accelerate import DeepSpeedPlugin
from accelerate.utils import is_deepspeed_available, parse_flag_from_env

from glm_grpo.errors import ConfigError

_STAGES = (2, 3)


def refuse_missing_deepspeed() -> None:
    """Before accelerate looks for it.

    Raises:
        ConfigError: The launch is for DeepSpeed, and there is none.
    """
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED") and not is_deepspeed_available():
        raise ConfigError(
            "accelerate was started for DeepSpeed, which is not installed: pip install deepspeed, "
            "or use configs/accelerate/fsdp2.yaml, which cuts up as much as ZeRO-3"
        )


def refuse_unfit_zero(plugin: DeepSpeedPlugin) -> None:
    """Settings that the trainer has keys of its own for, or does not run with.

    Raises:
        ConfigError: Names the first of them.
    """
    if plugin.zero_stage not in _STAGES:
        raise ConfigError(
            f"accelerate's zero_stage is {plugin.zero_stage}: it is 2 or 3 here; without ZeRO, use "
            "configs/accelerate/ddp.yaml"
        )
    if plugin.zero3_init_flag:
        raise ConfigError(
            "accelerate's zero3_init_flag is true: transformers would then cut up the frozen "
            "models (text encoder, scorers) as well; set it to false, as in "
            "configs/accelerate/deepspeed_zero3.yaml"
        )
    if plugin.gradient_clipping != "auto":
        raise ConfigError(
            f"accelerate's gradient_clipping is {plugin.gradient_clipping}: gradients are clipped "
            "to optim.max_grad_norm; leave it out"
        )
    devices = {
        "offload_optimizer_device": plugin.offload_optimizer_device,
        "offload_param_device": plugin.offload_param_device,
    }
    for key, device in devices.items():
        if device != "none":
            raise ConfigError(
                f"accelerate's {key} is {device}: the trainer was not tested with what DeepSpeed "
                "then steps by; set it to none"
            )
