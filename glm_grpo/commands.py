"""What the commands do, from a validated config to an exit code; building is left to `build`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import diffusers
import transformers
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table

from glm_grpo.analysis.memory import ConfigPlanner
from glm_grpo.analysis.probe import draw_probe, probed_prompts, report_probe
from glm_grpo.build import (
    build_batch,
    build_evaluation_batches,
    build_policy,
    build_prompt_set,
    build_prompts,
    build_stage,
    build_trainer,
    collect_settings,
    model_path,
)
from glm_grpo.config import Config
from glm_grpo.errors import ConfigError, ModelError, StorageError
from glm_grpo.glm_image.export import export_adapter, export_pipeline
from glm_grpo.glm_image.loading import DTYPES, load_pipeline
from glm_grpo.glm_image.self_check import self_check
from glm_grpo.report.memory_table import (
    advice_lines,
    describe_bytes,
    memory_lines,
    memory_table,
)
from glm_grpo.report.probe_page import probe_tables, write_probe
from glm_grpo.report.summary import SummaryRow
from glm_grpo.storage import storage_errors
from glm_grpo.training.clock import PhaseClock
from glm_grpo.training.collect import collect
from glm_grpo.training.evaluate import evaluate
from glm_grpo.training.resume import find_checkpoint, open_run
from glm_grpo.training.summaries import compare_evaluations
from glm_grpo.training.trackers import check_trackers
from rewards.build import build_reward
from rewards.serve import serve

logger = logging.getLogger(__name__)

_FEWEST_NOISES = 2


def run_training(config: Config) -> None:
    """Trains as the config says; prints where, and before against after.

    Raises:
        ConfigError: The run was started on several processes, or a tracker cannot be used.
        GlmGrpoError, RewardError: What is needed cannot be read, loaded or written.
    """
    accelerator = Accelerator()
    if accelerator.num_processes > 1:
        raise ConfigError(
            f"the run was started on {accelerator.num_processes} processes; this version trains "
            "on one; start it with `python train.py`"
        )
    check_trackers(config.trackers)
    prompts = build_prompts(config)
    opened = open_run(config)
    logger.info(
        "run folder: %s (from the first evaluation on, gallery/index.html in it can be opened at "
        "any time)",
        opened.folder.path,
    )
    console = Console(stderr=True)
    if not console.is_terminal:
        # Their bars redraw a line with control characters; a log has none.
        diffusers.utils.logging.disable_progress_bar()
        transformers.utils.logging.disable_progress_bar()
    stage = build_stage(config, accelerator.device, needs_reference=config.loss.kl_coef > 0)
    for prompt_set in (prompts.training, prompts.held_out):
        stage.scorer.check_prompts(prompt_set[index] for index in range(len(prompt_set)))
    trainer = build_trainer(config, stage, prompts, opened, accelerator, console)
    summary = trainer.run()
    if summary is None:
        console.print(
            f"stopped and saved; go on with train.resume={opened.folder.path}", soft_wrap=True
        )
    else:
        Console().print(summary_table(summary, title="held-out prompts, before and after"))
    Console().print(f"gallery: {opened.folder.gallery_path}", soft_wrap=True)


def check_config(config: Config) -> Iterator[str]:
    """Everything that can be checked before a run, cheapest first; yields what was found.

    Raises:
        GlmGrpoError, RewardError: The first check that fails.
    """
    check_trackers(config.trackers)
    yield "config: every key is known and in range"
    prompts = build_prompts(config)
    yield f"data: {len(prompts.training)} training and {len(prompts.held_out)} held-out prompts"
    # Adapters start as no change, and no reference is run here.
    stage = build_stage(config, Accelerator().device, needs_reference=False)
    yield f"model: loaded {config.model.path} in {config.model.dtype}"
    for prompt_set in (prompts.training, prompts.held_out):
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
    with stage.residency.phase("update"):
        report = self_check(stage.policy, experience, rows=config.train.micro_batch_size)
    yield (
        f"self-check: full grids, replay gap {report.mean_gap:.1e} nats a token (largest "
        f"{report.max_gap:.1e}), mean ratio {report.mean_ratio:.6f}"
    )


def plan_config(
    config: Config, *, memory: int | None, prompt_tokens: int, is_on_accelerator: bool
) -> Iterator[Table | str]:
    """What a run would take, by phase; yields what is to be printed.

    Args:
        config: Of the run to come; no model is loaded.
        memory: Bytes there are; None: it is not asked whether they suffice.
        prompt_tokens: Of the longest prompt.
        is_on_accelerator: False: everything is in CPU memory.

    Raises:
        ModelError: It does not fit, or the model's configs are not at hand.
    """
    planner = ConfigPlanner(
        model_path(config.model.path),
        prompt_tokens=prompt_tokens,
        is_on_accelerator=is_on_accelerator,
    )
    plan = planner.plan(config)
    yield memory_table(plan, title=f"memory of {config.model.path} by phase")
    yield from memory_lines(plan)
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
    stage = build_stage(config, Accelerator().device, needs_reference=False)
    stage.scorer.check_prompts(prompts.training[index] for index in range(len(prompts.training)))
    steps = math.ceil(min(num_prompts, len(prompts.training)) / config.rollout.prompts_per_step)
    batches = [build_batch(config, prompts.training, step) for step in range(steps)]
    samples = draw_probe(stage, batches, collect_settings(config), noises=noises)
    try:
        report = report_probe(samples, mode=config.reward.combine, shares=shares or None)
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
    stage = build_stage(config, Accelerator().device, needs_reference=False)
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
