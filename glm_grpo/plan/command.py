"""The body of `glm-grpo plan`."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from glm_grpo.build import build_planner
from glm_grpo.config import Config
from glm_grpo.errors import ModelError
from glm_grpo.models.planning import Parallelism
from glm_grpo.plan.fit import ConfigPlanner
from glm_grpo.plan.floors import DeviceSpeed, step_floors
from glm_grpo.plan.table import floor_lines, memory_lines, memory_table
from glm_grpo.terminal import describe_bytes


def plan_config(
    config: Config,
    *,
    memory: int | None,
    prompt_tokens: int,
    device: DeviceSpeed | None,
    processes: Parallelism,
) -> Iterator[Table | str]:
    """What a run would take, by phase; yields what is to be printed.

    Args:
        config: Of the run to come; no model is loaded.
        memory: Bytes there are; None: it is not asked whether they suffice.
        prompt_tokens: Of the longest prompt.
        device: None: there is no accelerator, and everything is in CPU memory.
        processes: That train together; figures are of the one with the largest part.

    Raises:
        ModelError: It does not fit, or the model's configs are not at hand.
        ConfigError: So many processes cannot run it.
    """
    of_model = build_planner(config.model.path)
    planner = ConfigPlanner(
        of_model,
        prompt_tokens=prompt_tokens,
        is_on_accelerator=device is not None,
        processes=processes,
    )
    plan = planner.plan(config)
    each = f", each of {processes.count} processes" if processes.count > 1 else ""
    yield memory_table(plan, title=f"memory of {config.model.path} by phase{each}")
    yield from memory_lines(plan)
    if device is not None:
        floors = step_floors(
            config,
            of_model,
            prompt_tokens=prompt_tokens,
            plan=plan,
            device=device,
            processes=processes.count,
        )
        yield from floor_lines(floors, device=device.name)
    if memory is None:
        return
    if plan.peak <= memory:
        yield f"it fits: {describe_bytes(memory - plan.peak)} to spare"
        return
    raise ModelError(
        f"the {plan.peak_phase} phase takes {describe_bytes(plan.peak)}, more than --memory "
        f"{describe_bytes(memory)}\n{planner.advise(config, memory).describe(memory)}"
    )
