"""Run training for `glm-grpo train`."""

from __future__ import annotations

import logging
import os
import shlex
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from accelerate.utils import get_int_from_env
from rich.console import Console
from rich.text import Text

from glm_grpo.builders.launch import Launch
from glm_grpo.builders.origin import describe_origin
from glm_grpo.builders.prompts import Prompts
from glm_grpo.builders.trainer import build_trainer
from glm_grpo.check import Checked, check_before_loading, load_checked
from glm_grpo.collectors.ray_cluster import RayCluster
from glm_grpo.commands.evaluate import summary_table
from glm_grpo.config import Config
from glm_grpo.config.composition import is_sweep
from glm_grpo.errors import ConfigError
from glm_grpo.models.planning import Parallelism
from glm_grpo.models.quiet import quiet_libraries
from glm_grpo.output import counted
from glm_grpo.plan.fit import refuse_for_processes
from glm_grpo.plan.floors import work_of_run
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.origin import describe_mixed_scores
from glm_grpo.run.summaries import summarise, untrained_means
from glm_grpo.run.tables import SummaryRow
from glm_grpo.studio.gallery import refresh_gallery
from glm_grpo.training.batches import build_batch
from glm_grpo.training.distributed.launch import refuse_separate_processes
from glm_grpo.training.distributed.processes import Processes, current_processes
from glm_grpo.training.distributed.strategy import has_shards, make_accelerator
from glm_grpo.training.loop import Trainer
from glm_grpo.training.replay_check import check_code_path
from glm_grpo.training.resume import (
    OpenedRun,
    keep_origin,
    open_run,
    pin_start,
    refuse_other_settings,
    resume_command,
)

logger = logging.getLogger(__name__)


def run_training(config: Config) -> RunFolder:
    """Train according to a config; prints the run folder and the comparison of before and after.

    Returns:
        The run folder.

    Raises:
        ConfigError: The launched processes, or a tracker, cannot be used.
        PeerError: Another process of the run failed.
        GlmGrpoError, RewardError: Reading, loading or writing failed.
    """
    launch = _launch(config)
    console = Console(stderr=True, quiet=not launch.processes.is_main)
    quiet_libraries(shows_downloads=launch.processes.is_main)
    processes, device = launch.processes, launch.accelerator.device
    with processes.together():
        refuse_other_settings(config)
    # Before there is a run folder, so that a refused config leaves nothing behind.
    checked = check_before_loading(
        config, device, parallelism=_parallelism(launch), processes=processes
    )
    given, config = config, checked.config
    if checked.note:
        logger.info("settings: %s", checked.note)
    for line in checked.hints if processes.is_main else ():
        logger.warning("%s", line)
    training = checked.prompts.training
    with processes.together():
        work = work_of_run(config, checked.planner, training, device, processes.count)
    launch = replace(launch, work=work)
    # A sweep continues in this process, however this run ends.
    with ExitStack() as ending:
        if config.train.mode == "async":
            cluster = RayCluster(config.asynchronous)
            ending.callback(cluster.close)
            launch = replace(launch, cluster=cluster)
        folder, summary = _open_and_train(given, checked, launch, console, ending)
    if processes.count > 1:
        launch.accelerator.end_training()
    if not processes.is_main:
        return folder
    results = Console(highlight=False)
    if summary is None:
        again = resume_command(folder.path)
        console.print(Text(f"stopped and saved; continue with {again}"), soft_wrap=True)
    else:
        untrained = untrained_means(folder)
        results.print(
            summary_table(summary, title="held-out prompts, before and after", untrained=untrained)
        )
        if mixed := describe_mixed_scores(folder):
            results.print(Text(mixed), soft_wrap=True)
    results.print(Text(f"gallery: {folder.gallery_path}"), soft_wrap=True)
    if summary is not None and not is_sweep():
        for line in _next_commands(folder):
            results.print(Text(line), soft_wrap=True)
    return folder


def _next_commands(folder: RunFolder) -> list[str]:
    """Commands for a finished run, to be pasted into a shell."""
    run = shlex.quote(str(folder.path))
    exported = shlex.quote(f"{folder.path}-export")
    return [
        f"to look at it:  glm-grpo gallery {run} --serve",
        f"to compare it:  glm-grpo compare OTHER_RUN {run}",
        f"to use it:      glm-grpo export {run} {exported}",
    ]


def _open_and_train(
    given: Config,
    checked: Checked,
    launch: Launch,
    console: Console,
    ending: ExitStack,
) -> tuple[RunFolder, list[SummaryRow] | None]:
    """Open the run folder, which keeps the config as given, and train what is left to do.

    The folder's lock is released at the end.

    Returns:
        The run folder, and the summary; None if the run was stopped.
    """
    opened = open_run(given, launch.processes)
    ending.callback(opened.lock.release)
    if opened.is_finished:
        return opened.folder, summarise(opened.folder)
    config = pin_start(checked.config, opened.checkpoint, launch.processes)
    keep = partial(_keep_origin, opened, given, config, checked.prompts, _devices_of(launch))
    launch.processes.on_main(keep)
    logger.info(
        "run folder: %s (open gallery/index.html in it once the first evaluation is done)",
        opened.folder.path,
    )
    folder = opened.folder
    trainer = _build(config, checked, opened, launch, console)
    # Keep no reference to the checkpoint: its files are mapped, and are removed during the run.
    del opened
    return folder, trainer.run()


def _keep_origin(
    opened: OpenedRun, given: Config, pinned: Config, prompts: Prompts, devices: str
) -> None:
    origin = describe_origin(pinned, held_out=prompts.held_out, training=prompts.training)
    keep_origin(opened, replace(origin, devices=devices), given)


def _devices_of(launch: Launch) -> str:
    """Name the devices of all processes, such as `2 x NVIDIA H100 80GB HBM3`."""
    device, count = launch.accelerator.device, launch.processes.count
    name = f"CPU ({counted(torch.get_num_threads(), 'thread')})"
    if device.type != "cpu":
        name = torch.get_device_module(device).get_device_name(device)
    return f"{count} x {name}" if count > 1 else name


def _build(
    config: Config, checked: Checked, opened: OpenedRun, launch: Launch, console: Console
) -> Trainer:
    """Load the models, and build the trainer."""
    processes = launch.processes
    with processes.together():
        models, rare = load_checked(
            config,
            checked.prompts,
            launch.accelerator.device,
            is_sharded=has_shards(launch.accelerator),
            is_beginning=not _has_start(config, opened),
        )
        if config.train.method == "grpo":
            found = check_code_path(
                models,
                build_batch(config, checked.prompts.training, 1),
                is_mixed=launch.accelerator.mixed_precision != "no",
            )
            if found:
                logger.info("self-check passed: %s", found)
    for line in checked.texts if processes.is_main else ():
        logger.info("%s", line)
    for line in rare if processes.is_main else ():
        logger.warning("%s", line)
    return build_trainer(
        config, models, checked.prompts, opened, launch, console, show=refresh_gallery
    )


def _has_start(config: Config, opened: OpenedRun) -> bool:
    """Whether the checkpoint to resume from contains everything the run started with."""
    if opened.checkpoint is None:
        return False
    return not config.needs_reference or "reference" in opened.checkpoint.tensors


def _launch(config: Config) -> Launch:
    """Set up the training processes; all but the main one only log problems.

    Raises:
        ConfigError: This many processes, or their engine, cannot run the config.
    """
    accelerator = make_accelerator()
    processes = current_processes()
    refuse_separate_processes(processes.count, os.environ)
    if not processes.is_main:
        logging.disable(logging.INFO)
    if processes.count > 1 and is_sweep():
        raise ConfigError(
            f"a sweep (-m) was started on {processes.count} processes, whose ties end with its "
            "first run; start its runs one by one"
        )
    if config.train.mode == "async":
        _check_asynchronous(processes)
    launch = Launch(accelerator, processes)
    refuse_for_processes(config, _parallelism(launch))
    return launch


def _parallelism(launch: Launch) -> Parallelism:
    """Describe how the launch distributes the run."""
    return Parallelism(
        count=launch.processes.count,
        is_sharded=has_shards(launch.accelerator),
        is_mixed=launch.accelerator.mixed_precision != "no",
        # Set by torchrun, with which accelerate starts processes.
        on_machine=get_int_from_env(["LOCAL_WORLD_SIZE"], 1),
    )


def _check_asynchronous(processes: Processes) -> None:
    """Refuse an asynchronous run on several processes.

    Raises:
        ConfigError: Several processes train.
    """
    if processes.count > 1:
        raise ConfigError(
            f"train.mode = 'async': the run was started on {processes.count} processes, and "
            "collectors work for a single one that learns; start it with `glm-grpo train`, or set "
            "train.mode=sync, in which the processes collect and learn together"
        )
