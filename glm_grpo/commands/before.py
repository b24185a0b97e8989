"""Before a run: what can be checked, planned and measured without training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from accelerate import Accelerator
from rich.table import Table

from glm_grpo.analysis.fit import check_fit
from glm_grpo.analysis.memory import ConfigPlanner
from glm_grpo.analysis.probe import draw_probe, probed_prompts, report_probe
from glm_grpo.analysis.process_rules import refuse_for_processes
from glm_grpo.analysis.step_time import step_floors
from glm_grpo.build import build_batch, build_prompts, collect_settings, load_stage, model_path
from glm_grpo.config import Config
from glm_grpo.errors import ConfigError, ModelError
from glm_grpo.glm_image.floors import DeviceSpeed
from glm_grpo.glm_image.self_check import self_check
from glm_grpo.glm_image.shards import ONE_PROCESS, Processes
from glm_grpo.report.memory_table import (
    advice_lines,
    describe_bytes,
    floor_lines,
    memory_lines,
    memory_table,
)
from glm_grpo.report.probe_page import probe_tables, write_probe
from glm_grpo.training.clock import PhaseClock
from glm_grpo.training.collect import collect
from glm_grpo.training.out_of_memory import out_of_memory_explained, replay_size
from glm_grpo.training.ray_cluster import require_ray
from glm_grpo.training.trackers import check_trackers

_FEWEST_NOISES = 2


def check_config(config: Config) -> Iterator[str]:
    """Everything that can be checked before a run, cheapest first; yields what was found.

    Raises:
        GlmGrpoError, RewardError: The first check that fails.
    """
    check_trackers(config.trackers)
    if config.train.mode == "async":
        require_ray()
    yield "config: every key is known and in range"
    yield f"processes: {_described_processes(config)}"
    prompts = build_prompts(config)
    yield f"data: {len(prompts.training)} training and {len(prompts.held_out)} held-out prompts"
    sources = (prompts.training, prompts.held_out)
    device = Accelerator().device
    yield f"memory: {check_fit(config, model_path(config.model.path), sources, device)}"
    stage = load_stage(config, device, needs_reference=config.loss.kl_coef > 0)
    yield f"model: loaded {config.model.path} in {config.model.dtype}"
    for prompt_set in sources:
        stage.scorer.check_prompts(prompt_set[index] for index in range(len(prompt_set)))
    yield f"reward: {', '.join(stage.scorer.names)}; every prompt has a term that applies"
    experience = collect(
        stage,
        build_batch(config, prompts.training, 0),
        collect_settings(config),
        policy_step=0,
        clock=PhaseClock(lambda _: None),
    )
    means = zip(stage.scorer.names, experience.rewards.raw.mean(dim=(0, 1)).tolist(), strict=True)
    yield f"one rollout: {', '.join(f'{name} {mean:.3f}' for name, mean in means)}"
    rows = config.train.micro_batch_size
    with (
        out_of_memory_explained("update", replay_size(experience.prompts, rows)),
        stage.residency.phase("update"),
    ):
        report = self_check(stage.policy, experience, rows=rows)
    yield (
        f"self-check: full grids, replay gap {report.mean_gap:.1e} nats a token (largest "
        f"{report.max_gap:.1e}), mean ratio {report.mean_ratio:.6f}"
    )


def _described_processes(config: Config) -> str:
    """How many can run the config; no reason to refuse it here, where there is always one."""
    try:
        refuse_for_processes(config, ONE_PROCESS)
    except ConfigError as error:
        return f"a single one is refused by train.py: {error}"
    is_asynchronous = config.train.mode == "async"
    return "1" if is_asynchronous else f"1 to {config.rollout.prompts_per_step}"


def plan_config(
    config: Config,
    *,
    memory: int | None,
    prompt_tokens: int,
    device: DeviceSpeed | None,
    processes: Processes,
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
    path = model_path(config.model.path)
    planner = ConfigPlanner(
        path,
        prompt_tokens=prompt_tokens,
        is_on_accelerator=device is not None,
        processes=processes,
    )
    plan = planner.plan(config)
    each = f", each of {processes.count} processes" if processes.count > 1 else ""
    yield memory_table(plan, title=f"memory of {config.model.path} by phase{each}")
    yield from memory_lines(plan)
    if device is not None:
        yield from floor_lines(
            step_floors(
                config,
                path,
                prompt_tokens=prompt_tokens,
                plan=plan,
                device=device,
                processes=processes.count,
            )
        )
    if memory is None:
        return
    if plan.peak <= memory:
        yield f"it fits: {describe_bytes(memory - plan.peak)} to spare"
        return
    advice = "\n".join(advice_lines(planner.advise(config, memory), memory=memory))
    raise ModelError(
        f"the {plan.peak_phase} phase takes {describe_bytes(plan.peak)}, more than --memory "
        f"{describe_bytes(memory)}\n{advice}"
    )


def probe_config(
    config: Config,
    *,
    num_prompts: int,
    noises: int,
    shares: Mapping[str, float],
    directory: Path,
) -> tuple[list[Table], Path]:
    """Samples the untrained model and says what each reward term measures there.

    Args:
        config: Of the run to come; its training prompts are used, a step's worth at a time.
        num_prompts: Prompts sampled, at least; rounded up to whole steps.
        noises: Noises one sample of each prompt is decoded under besides, >= 2.
        shares: Of the advantage, by term, if weights are to be proposed; empty for none.
        directory: Of the page.

    Returns:
        Tables for the terminal, and the path of the page.

    Raises:
        ConfigError: A number is out of range, or no weights give the shares.
        GlmGrpoError, RewardError: As in a run.
    """
    if num_prompts < 1 or noises < _FEWEST_NOISES:
        raise ConfigError(
            f"--prompts {num_prompts} and --noises {noises}: at least 1 prompt, and "
            f"{_FEWEST_NOISES} noises, for a spread to be seen"
        )
    _check_shares(shares, tuple(config.reward.terms))
    prompts = build_prompts(config)
    stage = load_stage(config, Accelerator().device, needs_reference=False)
    stage.scorer.check_prompts(prompts.training[index] for index in range(len(prompts.training)))
    steps = math.ceil(min(num_prompts, len(prompts.training)) / config.rollout.prompts_per_step)
    batches = [build_batch(config, prompts.training, step) for step in range(steps)]
    samples = draw_probe(stage, batches, collect_settings(config), noises=noises)
    try:
        report = report_probe(
            samples,
            mode=config.reward.combine,
            shares=shares or None,
            min_rank_correlation=config.decode.min_rank_correlation,
        )
    except ValueError as error:
        raise ConfigError(f"--share: {error}") from error
    pictures = probed_prompts(samples, mode=config.reward.combine)
    return probe_tables(report), write_probe(report, pictures, directory)


def _check_shares(shares: Mapping[str, float], names: Sequence[str]) -> None:
    """Before anything is sampled: `weights_for_shares` would find out at the end."""
    unknown = sorted(shares.keys() - set(names))
    if unknown:
        raise ConfigError(
            f"--share names {', '.join(unknown)}; the config has the terms {', '.join(names)}"
        )
    total = sum(shares.values())
    if shares and (min(shares.values()) < 0 or not math.isclose(total, 1.0, abs_tol=1e-6)):
        raise ConfigError(f"--share adds up to {total:g}; shares are 0 or more and add up to 1")
