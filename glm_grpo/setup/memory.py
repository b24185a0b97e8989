"""Check that a run fits the memory of its device."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from glm_grpo.config import Config
from glm_grpo.data.prompts import PromptSource
from glm_grpo.errors import MemoryLimitError
from glm_grpo.models.planning import MemoryPlan, Parallelism, Planner
from glm_grpo.output import describe_bytes
from glm_grpo.plan.fit import UNCERTAINTY, ConfigPlanner
from glm_grpo.plan.machine_memory import available_memory, cpu_memory

logger = logging.getLogger(__name__)


def check_fit(
    config: Config,
    planner: Planner | None,
    sources: Sequence[PromptSource],
    device: torch.device,
    parallelism: Parallelism,
) -> str:
    """Refuse a config that cannot fit, and warn about one that may not.

    If the sizes of the model (a hub id other than the published one) or of the device are unknown,
    nothing is planned, and a log line says so.

    Args:
        planner: Planner of the model; None if its sizes are unknown.
        sources: All prompts.
        parallelism: Processes that train together. They share CPU memory and have one CUDA device
            each.

    Returns:
        Description of the memory needed and available.

    Raises:
        MemoryLimitError: The plan exceeds the memory by more than its uncertainty.
    """
    memory = available_memory(device)
    if memory is None or planner is None:
        skipped = "not planned, because the size of the model or of the device is unknown"
        logger.info("memory: %s", skipped)
        return skipped
    is_on_accelerator = device.type != "cpu"
    if not is_on_accelerator:
        memory //= parallelism.on_machine
    captions = [caption for source in sources for caption in source.captions()]
    height, width = config.rollout.height, config.rollout.width
    tokens = planner.longest_prompt_tokens(captions, height=height, width=width)
    of_configs = ConfigPlanner(
        planner,
        prompt_tokens=planner.usual_prompt_tokens if tokens is None else tokens,
        is_on_accelerator=is_on_accelerator,
        parallelism=parallelism,
    )
    plan = of_configs.plan(config)
    place = "on the accelerator" if is_on_accelerator else "in CPU memory"
    each = f" for each of {parallelism.count} processes" if parallelism.count > 1 else ""
    takes = f"the {plan.peak_phase} phase takes {describe_bytes(plan.peak)}"
    there = f"there is {describe_bytes(memory)} {place}{each}"
    if plan.peak > memory * (1 + UNCERTAINTY):
        logger.info("%s, %s: searching for settings that fit", takes, there)
        phases = ", ".join(f"{phase} {describe_bytes(plan.total(phase))}" for phase in plan.phases)
        advice = of_configs.advise(config, memory).describe(memory)
        raise MemoryLimitError(f"{takes}, and {there} ({phases})\n{advice}")
    if plan.peak > memory:
        logger.warning(
            "%s, and %s: the difference is within the uncertainty of the plan (%.0f %%), so the "
            "run continues; `glm-grpo plan --memory` shows what would make it fit",
            takes,
            there,
            100 * UNCERTAINTY,
        )
    if is_on_accelerator:
        _warn_of_loading(plan, parallelism)
    return f"{takes}, {there}"


def _warn_of_loading(plan: MemoryPlan, parallelism: Parallelism) -> None:
    """Warn only, because pages of mapped files count as used, although they can be reclaimed."""
    memory = cpu_memory()
    takes = plan.cpu_at_start * parallelism.on_machine
    if memory is not None and takes > memory:
        logger.warning(
            "loading the models takes %s of CPU memory (%d processes on this machine), but there "
            "is only %s: the system may kill the run",
            describe_bytes(takes),
            parallelism.on_machine,
            describe_bytes(memory),
        )
