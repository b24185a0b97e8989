"""What the commands do, from a validated config to an exit code; building is left to `build`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import diffusers
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import get_int_from_env
from rich.console import Console
from rich.table import Table

from glm_grpo.analysis.fit import check_fit
from glm_grpo.analysis.memory import ConfigPlanner
from glm_grpo.analysis.probe import draw_probe, probed_prompts, report_probe
from glm_grpo.analysis.process_rules import refuse_for_processes
from glm_grpo.analysis.step_time import step_floors
from glm_grpo.build import (
    Launch,
    build_batch,
    build_evaluation_batches,
    build_policy,
    build_prompt_set,
    build_prompts,
    build_stage,
    build_trainer,
    collect_settings,
    collector_needs,
    model_path,
)
from glm_grpo.config import Config
from glm_grpo.errors import ConfigError, ModelError, StorageError
from glm_grpo.glm_image.export import export_adapter, export_pipeline
from glm_grpo.glm_image.floors import DeviceSpeed
from glm_grpo.glm_image.loading import DTYPES, load_pipeline
from glm_grpo.glm_image.self_check import self_check
from glm_grpo.glm_image.shards import Processes
from glm_grpo.present import is_sweep
from glm_grpo.report.memory_table import (
    advice_lines,
    describe_bytes,
    floor_lines,
    memory_lines,
    memory_table,
)
from glm_grpo.report.probe_page import probe_tables, write_probe
from glm_grpo.report.summary import SummaryRow
from glm_grpo.storage import storage_errors
from glm_grpo.training.clock import PhaseClock
from glm_grpo.training.collect import Stage, collect
from glm_grpo.training.engine import has_shards, make_accelerator
from glm_grpo.training.evaluate import evaluate
from glm_grpo.training.out_of_memory import out_of_memory_explained, replay_size
from glm_grpo.training.ray_cluster import RayCluster, require_ray
from glm_grpo.training.resume import find_checkpoint, open_run
from glm_grpo.training.summaries import compare_evaluations
from glm_grpo.training.team import Team, current_team
from glm_grpo.training.trackers import check_trackers
from rewards.build import build_reward
from rewards.serve import read_token, serve

logger = logging.getLogger(__name__)

_FEWEST_NOISES = 2


def run_training(config: Config) -> None:
    """Trains as the config says; prints where, and before against after.

    Raises:
        ConfigError: The processes it was started on, or a tracker, cannot be used.
        PeerError: Another process of the run failed.
        GlmGrpoError, RewardError: What is needed cannot be read, loaded or written.
    """
    launch = _launch(config)
    team, device = launch.team, launch.accelerator.device
    check_trackers(config.trackers)
    with team.together():
        prompts = build_prompts(config)
        sources = (prompts.training, prompts.held_out)
        # Before there is a run folder: a config that cannot fit leaves nothing behind.
        check_fit(config, model_path(config.model.path), sources, device, _processes(launch))
    if config.train.mode == "async":
        cluster = RayCluster(config.asynchronous.address, collector_needs(config))
        launch = replace(launch, cluster=cluster)
    opened = open_run(config, team)
    logger.info(
        "run folder: %s (from the first evaluation on, gallery/index.html in it can be opened at "
        "any time)",
        opened.folder.path,
    )
    console = Console(stderr=True, quiet=not team.is_main)
    if not console.is_terminal or not team.is_main:
        # Their bars redraw a line with control characters; a log has none.
        diffusers.utils.logging.disable_progress_bar()
        transformers.utils.logging.disable_progress_bar()
    with team.together():
        stage = _load_stage(
            config,
            device,
            needs_reference=config.loss.kl_coef > 0,
            is_sharded=has_shards(launch.accelerator),
        )
        for prompt_set in sources:
            stage.scorer.check_prompts(prompt_set[index] for index in range(len(prompt_set)))
    trainer = build_trainer(config, stage, prompts, opened, launch, console)
    try:
        summary = trainer.run()
    finally:
        # A sweep goes on in this process.
        opened.lock.release()
    if team.size > 1:
        launch.accelerator.end_training()
    if not team.is_main:
        return
    if summary is None:
        console.print(
            f"stopped and saved; go on with train.resume={opened.folder.path}", soft_wrap=True
        )
    else:
        Console().print(summary_table(summary, title="held-out prompts, before and after"))
    Console().print(f"gallery: {opened.folder.gallery_path}", soft_wrap=True)


def _launch(config: Config) -> Launch:
    """The processes that train; the log of all but the main one is for what goes wrong.

    Raises:
        ConfigError: The config cannot be run by so many, or by their engine.
    """
    accelerator = make_accelerator()
    team = current_team()
    if not team.is_main:
        logging.disable(logging.INFO)
    if team.size > 1 and is_sweep():
        raise ConfigError(
            f"a sweep (-m) was started on {team.size} processes, whose ties end with its first "
            "run; start its runs one by one"
        )
    if config.train.mode == "async":
        _check_asynchronous(team)
    launch = Launch(accelerator, team)
    refuse_for_processes(config, _processes(launch))
    return launch


def _processes(launch: Launch) -> Processes:
    """How the launch spreads the run."""
    return Processes(
        count=launch.team.size,
        is_sharded=has_shards(launch.accelerator),
        is_mixed=launch.accelerator.mixed_precision != "no",
        # torchrun's, which accelerate starts processes by.
        on_machine=get_int_from_env(["LOCAL_WORLD_SIZE"], 1),
    )


def _check_asynchronous(team: Team) -> None:
    """Refuses what an asynchronous run cannot do, before anything is loaded.

    Raises:
        ConfigError: Ray is not installed, or several processes train.
    """
    if team.size > 1:
        raise ConfigError(
            f"train.mode = 'async': the run was started on {team.size} processes, and collectors "
            "work for a single one that learns; start it with `python train.py`, or set "
            "train.mode=sync, in which the processes collect and learn together"
        )
    require_ray()


def check_config(config: Config) -> Iterator[str]:
    """Everything that can be checked before a run, cheapest first; yields what was found.

    Raises:
        GlmGrpoError, RewardError: The first check that fails.
    """
    check_trackers(config.trackers)
    if config.train.mode == "async":
        require_ray()
    yield "config: every key is known and in range"
    prompts = build_prompts(config)
    yield f"data: {len(prompts.training)} training and {len(prompts.held_out)} held-out prompts"
    sources = (prompts.training, prompts.held_out)
    device = Accelerator().device
    yield f"memory: {check_fit(config, model_path(config.model.path), sources, device)}"
    stage = _load_stage(config, device, needs_reference=config.loss.kl_coef > 0)
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
    stage = _load_stage(config, Accelerator().device, needs_reference=False)
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


def serve_term(
    config: Config, name: str, *, host: str, port: int, announce: Callable[[str], None]
) -> None:
    """Serves one term of the config over HTTP until Ctrl-C or SIGTERM.

    Raises:
        ConfigError: The config has no such term.
        RewardError: It cannot be built, or the address cannot be listened at.
    """
    terms = config.reward.terms
    if name not in terms:
        raise ConfigError(
            f"{name!r} is not a term of this config ({', '.join(terms)}); name one of them, or add "
            f"it: +reward.terms.{name}.weight=1"
        )
    # A token that is missing is told before weights are loaded.
    read_token(host)
    reward = build_reward(terms[name], Accelerator().device)
    serve(reward, name=name, needs=terms[name].needs(), host=host, port=port, announce=announce)


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
    stage = _load_stage(config, Accelerator().device, needs_reference=False)
    batches = build_evaluation_batches(config, build_prompt_set(config.data.eval_path, config))
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


def _load_stage(
    config: Config, device: torch.device, *, needs_reference: bool, is_sharded: bool = False
) -> Stage:
    with out_of_memory_explained("loading", f"{config.model.path} in {config.model.dtype}"):
        return build_stage(config, device, needs_reference=needs_reference, is_sharded=is_sharded)


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
