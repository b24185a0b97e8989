"""`glm-grpo plan`: print memory by phase and the minimum time of a step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from glm_grpo.config import EMBEDDED_MODELS, Config, compose_config, flatten
from glm_grpo.config.composition import PACKAGED_CONFIGS
from glm_grpo.errors import ModelError
from glm_grpo.models.find import find_model
from glm_grpo.models.planning import MemoryPlan, Parallelism, Planner
from glm_grpo.output import counted, describe_bytes
from glm_grpo.plan.devices import KNOWN, DeviceSpeed, Hardware, without_bfloat16
from glm_grpo.plan.expected import GROUND, LONG, cheaper_configs, expected_seconds
from glm_grpo.plan.fit import ConfigPlanner
from glm_grpo.plan.floors import PhaseFloor, step_floors
from glm_grpo.plan.measured import describe_seconds, device_lines, measured_table
from glm_grpo.run.folder import RunFolder

_OF_A_SIZE = re.compile(r"_(\d+)gb$")
"""End of the name of a config for one device, with its memory in GB."""

_UNITS_OF_TIME = (("days", 86_400, 86_400), ("hours", 3_600, 7_200), ("minutes", 60, 0))
"""Unit, its seconds, and the seconds from which it is used."""


def memory_table(plan: MemoryPlan, *, title: str) -> Table:
    """Table of bytes by item and phase, with the peak phase in bold."""
    place = "accelerator" if plan.is_on_accelerator else "CPU memory"
    table = Table(title=f"{title}, GB", caption=f"phases: {place}, 1 GB = 1e9 bytes")
    longest = max((word for item in plan.items for word in item.name.split()), key=len)
    table.add_column("", min_width=len(longest))  # 80 characters then break no word
    for phase in plan.phases:
        style = "bold" if phase == plan.peak_phase else ""
        table.add_column(phase, justify="right", style=style)
    table.add_column("CPU memory", justify="right")
    for item in plan.items:
        cells = [_cell(item.by_phase.get(phase, 0)) for phase in plan.phases]
        table.add_row(item.name, *cells, _cell(item.cpu))
    if plan.overhead:
        table.add_row("driver and libraries", *[_cell(plan.overhead)] * len(plan.phases), "-")
    table.add_section()
    totals = [_cell(plan.total(phase)) for phase in plan.phases]
    table.add_row("total", *totals, _cell(plan.cpu))
    return table


def memory_lines(plan: MemoryPlan) -> list[str]:
    """Lines for the values that have no column in the table."""
    lines = [
        f"peak: {describe_bytes(plan.peak)} in the {plan.peak_phase} phase",
        f"CPU memory while the models are loaded: {describe_bytes(plan.cpu_at_start)}",
    ]
    if plan.moved_in:
        lines.append(
            f"offloading copies {describe_bytes(plan.moved_in)} to the accelerator and "
            f"{describe_bytes(plan.moved_out)} back in a step"
        )
    return lines


def floor_lines(
    floors: Mapping[str, PhaseFloor], *, device: str, collectors: int | None = None
) -> list[str]:
    """Lines on the minimum time of a step.

    Args:
        floors: Floors by phase.
        device: Name of the device.
        collectors: Number of collectors that make batches during learning; None: phases run one
            after the other.
    """
    seconds = {name: floor.seconds for name, floor in floors.items()}
    phases = ", ".join(f"{name} {describe_seconds(each)}" for name, each in seconds.items())
    least, order = sum(seconds.values()), "its phases one after the other"
    if collectors is not None:
        collecting = seconds["rollout"] + seconds["decode"]
        least = max(least - collecting, collecting / collectors)
        order = f"{counted(collectors, 'collector')} beside the learner, each on such a device"
    return [f"a step takes at least {describe_seconds(least)} on {device}, {order}: {phases}"]


def expected_line(config: Config, floors: Mapping[str, PhaseFloor]) -> str:
    """Line on the time that a step and a run will probably take, and why."""
    step = expected_seconds(config, floors)
    ratio = step / sum(floor.seconds for floor in floors.values())
    run = describe_duration(step * config.train.steps)
    return (
        f"expect about {describe_seconds(step)}, {ratio:.2g} times as long, judging by {GROUND}; "
        f"{counted(config.train.steps, 'step')}: {run}, without scores and evaluations"
    )


def describe_duration(seconds: float) -> str:
    """Format the time of a run with two digits, in minutes, hours or days."""
    unit, size = next((name, size) for name, size, least in _UNITS_OF_TIME if seconds >= least)
    amount = seconds / size
    return f"{amount:.{0 if amount >= 10 else 1}f} {unit}"


def _cell(number: int) -> str:
    """Format bytes in GB, without the unit: seven columns fit 80 characters."""
    if not number:
        return "-"
    return f"{number / 1e9:.2f}" if number >= 5e6 else "<0.01"


def plan_config(
    config: Config,
    *,
    memory: int | None,
    prompt_tokens: int | None,
    hardware: Hardware | None,
    parallelism: Parallelism,
    measured: RunFolder | None = None,
) -> Iterator[Table | str]:
    """Plan a run by phase; yields what to print.

    Args:
        config: Config of the planned run; no model is loaded.
        memory: Available bytes; None: those of the hardware, unless a run was measured.
        hardware: Devices and their memory; None: there is no accelerator, and everything is in CPU
            memory.
        parallelism: Processes that train together; values are for the one with the largest part.
        measured: A run of this config, whose seconds are shown next to the floors.
    """
    model = find_model(config.model.path)
    of_model = model.planner()
    model.family.check_keys(config)
    if not (config.data.sources or config.reads_targets):
        # Otherwise the rules may need files of the model.
        model.family.check_sizes(model.path, config)
    if prompt_tokens is None:
        prompt_tokens = of_model.usual_prompt_tokens
        yield f"prompts of {prompt_tokens} tokens are assumed (--prompt-tokens changes it)"
    planner = ConfigPlanner(
        of_model,
        prompt_tokens=prompt_tokens,
        is_on_accelerator=hardware is not None,
        parallelism=parallelism,
    )
    planner.refuse_misfit(config)
    plan = planner.plan(config)
    each = f", each of {parallelism.count} processes" if parallelism.count > 1 else ""
    yield memory_table(plan, title=f"memory of {config.model.path} by phase{each}")
    yield from memory_lines(plan)
    yield from model.family.hint_at_size(model.path, config)
    # A run that was measured did fit, perhaps on more devices than are planned for here.
    if memory is None and hardware is not None and measured is None:
        memory = hardware.memory
    if memory is not None and plan.peak > memory:
        # Before any times, which would be those of a run that cannot be.
        raise ModelError(
            f"the {plan.peak_phase} phase takes {describe_bytes(plan.peak)}, more than "
            f"{describe_bytes(memory)}\n{_describe_fitting(config, planner, memory)}"
        )
    if hardware is not None:
        times = _Times(of_model, planner, prompt_tokens, parallelism.count)
        yield from times.describe(config, hardware, measured)
    if memory is not None:
        yield f"it fits: {describe_bytes(memory - plan.peak)} free"


def _describe_fitting(config: Config, planner: ConfigPlanner, memory: int) -> str:
    """Name the packaged config that is made for a memory, and settings with which a config fits."""
    lines = [planner.advise(config, memory).describe(memory)]
    if packaged := _packaged_for(config, memory):
        name, other = packaged
        if (peak := planner.plan(other).peak) <= memory:
            lines.insert(
                0, f"for this memory there is --config-name {name}: {describe_bytes(peak)}"
            )
    return "\n".join(lines)


def _packaged_for(config: Config, memory: int) -> tuple[str, Config] | None:
    """The packaged config of the same model and task for the largest device within a memory.

    None if it is the one in use, perhaps with other values: no other has so many of its values.
    """
    prompts = ("data.path=prompts.txt", "data.eval_path=held_out.txt")
    found: dict[int, tuple[str, Config]] = {}
    for path in PACKAGED_CONFIGS.glob("*gb.yaml"):
        if match := _OF_A_SIZE.search(path.stem):
            other = compose_config(None, path.stem, prompts)
            if _task_of(other) == _task_of(config):
                found[int(match[1])] = path.stem, other
    fitting = [size for size in found if size * 10**9 <= memory]
    if not fitting:
        return None
    values = flatten(config.model_dump()).items()
    in_use = max(found, key=lambda size: _count_shared(values, found[size][1]))
    return None if max(fitting) == in_use else found[max(fitting)]


def _count_shared(values: Iterable[tuple[str, object]], other: Config) -> int:
    theirs = flatten(other.model_dump())
    return sum(key in theirs and theirs[key] == value for key, value in values)


def _task_of(config: Config) -> tuple[str, bool, bool]:
    return config.model.path, config.model.adapter is None, config.data.sources > 0


@dataclass(frozen=True)
class _Times:
    """Times of steps of one model."""

    of_model: Planner
    planner: ConfigPlanner
    prompt_tokens: int
    processes: int

    def describe(
        self, config: Config, hardware: Hardware, measured: RunFolder | None
    ) -> Iterator[Any]:
        if not hardware.devices:
            yield f"no GPU with this memory is known, so there are no times; known: {KNOWN}"
        is_asynchronous = config.train.mode == "async"
        collectors = config.asynchronous.collectors if is_asynchronous else None
        for device in hardware.devices:
            floors = self._floors(config, device)
            yield from floor_lines(floors, device=device.name, collectors=collectors)
            if measured is not None:
                yield from device_lines(measured, device)
                in_dtype = device.in_dtype(config.model.dtype)
                yield measured_table(measured, floors, in_dtype, is_asynchronous=is_asynchronous)
            elif collectors is None and config.model.path not in EMBEDDED_MODELS:
                yield expected_line(config, floors)
                yield from self._cheaper_lines(config, device, floors)
            if config.model.dtype == "bfloat16" and not device.has_bfloat16:
                is_denoising = config.decode.steps is not None
                yield without_bfloat16(f"the {device.name}", is_denoising=is_denoising)
        if hardware.devices:
            yield "(minimum times: published peak figures, no losses, no reward terms)"

    def _cheaper_lines(
        self, config: Config, device: DeviceSpeed, floors: Mapping[str, PhaseFloor]
    ) -> Iterator[str]:
        if expected_seconds(config, floors) * config.train.steps < LONG:
            return
        for overrides, changed in cheaper_configs(config):
            step = expected_seconds(changed, self._floors(changed, device))
            yield f"  with {overrides}: {describe_duration(step * config.train.steps)}"

    def _floors(self, config: Config, device: DeviceSpeed) -> dict[str, PhaseFloor]:
        return step_floors(
            config,
            self.of_model,
            prompt_tokens=self.prompt_tokens,
            plan=self.planner.plan(config),
            device=device,
            processes=self.processes,
        )
