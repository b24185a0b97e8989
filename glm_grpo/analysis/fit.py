"""Will a run fit into the memory at hand? Asked at its start, before a model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from glm_grpo.analysis.available_memory import available_memory, cpu_memory
from glm_grpo.analysis.memory import ConfigPlanner
from glm_grpo.config import Config
from glm_grpo.errors import MemoryLimitError
from glm_grpo.glm_image.meta_models import PUBLISHED_ID
from glm_grpo.glm_image.prompt_inputs import longest_prompt_tokens
from glm_grpo.glm_image.shards import ONE_PROCESS, Processes
from glm_grpo.report.memory_plan import PHASES, MemoryPlan
from glm_grpo.report.memory_table import advice_lines, describe_bytes
from glm_grpo.training.prompts import PromptSource

logger = logging.getLogger(__name__)

UNCERTAINTY = 0.1
"""Part of a plan by which measured peaks differ from it, at most."""


_PROMPT_TOKENS = 256
"""Of the longest prompt where the model's tokenizer is not at hand, as `glm-grpo plan` takes it."""


def check_fit(
    config: Config,
    path: str,
    sources: Sequence[PromptSource],
    device: torch.device,
    processes: Processes = ONE_PROCESS,
) -> str:
    """Refuses a config that cannot fit, and warns of one that may not.

    Without the model's sizes (a hub id other than the published one) or the device's, nothing is
    planned, and a line of the log says so.

    Args:
        config: Of the run.
        path: Folder of the model, or hub id.
        sources: All prompts.
        device: Where the phases take place.
        processes: That train together. They share CPU memory, and have a CUDA device each.

    Returns:
        What it takes, of what there is.

    Raises:
        MemoryLimitError: It takes more than there is by more than a plan is uncertain.
    """
    memory = available_memory(device)
    if memory is None or not _are_sizes_known(path):
        skipped = "not planned, since the sizes of the model or of the device are not at hand"
        logger.info("memory: %s", skipped)
        return skipped
    is_on_accelerator = device.type != "cpu"
    if not is_on_accelerator:
        memory //= processes.on_machine
    planner = ConfigPlanner(
        path,
        prompt_tokens=_longest_prompt(config, path, sources),
        is_on_accelerator=is_on_accelerator,
        processes=processes,
    )
    plan = planner.plan(config)
    place = "on the accelerator" if is_on_accelerator else "in CPU memory"
    takes = f"the {plan.peak_phase} phase takes {describe_bytes(plan.peak)}"
    there = f"there is {describe_bytes(memory)} {place}{_of_each(processes)}"
    if plan.peak > memory * (1 + UNCERTAINTY):
        logger.info("%s, %s: looking for keys that make it fit", takes, there)
        advice = "\n".join(advice_lines(planner.advise(config, memory), memory=memory))
        raise MemoryLimitError(f"{takes}, and {there} ({_phases(plan)})\n{advice}")
    if plan.peak > memory:
        logger.warning(
            "%s, and %s: by less than a plan is uncertain (%.0f %%), so the run goes on; "
            "`glm-grpo plan --memory` says what makes it fit",
            takes,
            there,
            100 * UNCERTAINTY,
        )
    if is_on_accelerator:
        _warn_of_loading(plan, processes)
    return f"{takes}, {there}"


def _are_sizes_known(path: str) -> bool:
    """Of a pipeline's folder, or as published; any other folder is refused when it is loaded."""
    return path == PUBLISHED_ID or (Path(path) / "model_index.json").is_file()


def _longest_prompt(config: Config, path: str, sources: Sequence[PromptSource]) -> int:
    captions = [caption for source in sources for caption in source.captions()]
    size = config.rollout
    if not (Path(path) / "processor").is_dir():
        return _PROMPT_TOKENS
    try:
        return longest_prompt_tokens(path, captions, height=size.height, width=size.width)
    except (OSError, ValueError):
        # Whoever loads the model says what is wrong with its files.
        return _PROMPT_TOKENS


def _of_each(processes: Processes) -> str:
    return f" for each of {processes.count} processes" if processes.count > 1 else ""


def _warn_of_loading(plan: MemoryPlan, processes: Processes) -> None:
    """Only a warning: pages of files that are mapped count as taken, and can be given back."""
    memory = cpu_memory()
    takes = plan.cpu_at_start * processes.on_machine
    if memory is not None and takes > memory:
        logger.warning(
            "loading the models takes %s of CPU memory (%d processes on this machine), and there "
            "is %s: the system may end the run there",
            describe_bytes(takes),
            processes.on_machine,
            describe_bytes(memory),
        )


def _phases(plan: MemoryPlan) -> str:
    return ", ".join(f"{phase} {describe_bytes(plan.total(phase))}" for phase in PHASES)
