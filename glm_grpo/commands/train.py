"""Run training for `glm-grpo train`: prepare, open the run folder, load, train."""

from __future__ import annotations

import logging
import os
import shlex
from contextlib import ExitStack

import torch
from rich.console import Console
from rich.text import Text

from glm_grpo.collectors.ray_cluster import RayCluster
from glm_grpo.commands.eval import summary_table
from glm_grpo.config import Config, can_be_extended
from glm_grpo.config.composition import is_sweep
from glm_grpo.errors import ConfigError
from glm_grpo.models.quiet import quiet_libraries
from glm_grpo.output import counted
from glm_grpo.run.config import read_config
from glm_grpo.run.differences import train_longer
from glm_grpo.run.finding import resume_command
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.lock import RunLock
from glm_grpo.run.provenance import describe_mixed_scores
from glm_grpo.run.resume import find_resumed, make_run_folder
from glm_grpo.run.summaries import base_means, summarise
from glm_grpo.run.tables import SummaryRow
from glm_grpo.setup.prepared_run import PreparedRun, prepare
from glm_grpo.setup.provenance import describe_provenance, keep_provenance
from glm_grpo.setup.trainer import build_trainer
from glm_grpo.studio.gallery import refresh_gallery
from glm_grpo.training.batches import build_batch
from glm_grpo.training.distributed.launch import refuse_separate_processes
from glm_grpo.training.distributed.processes import Processes, current_processes
from glm_grpo.training.distributed.strategy import make_accelerator
from glm_grpo.training.replay_check import check_code_path

logger = logging.getLogger(__name__)


def run_training(config: Config) -> RunFolder:
    """Train according to a config; prints the run folder and the comparison of before and after.

    Returns:
        The run folder.

    Raises:
        PeerError: Another process of the run failed.
    """
    accelerator = make_accelerator()
    processes = current_processes()
    _check_launch(config, processes)
    quiet_libraries(shows_downloads=processes.is_main)
    # A sweep continues in this process, however this run ends.
    with ExitStack() as ending:
        lock = RunLock()
        ending.callback(lock.release)
        resumed = processes.on_main(lambda: find_resumed(config, lock))
        summary: list[SummaryRow] | None
        if resumed is not None and resumed.is_finished:
            folder, summary = resumed.folder, summarise(resumed.folder)
        else:
            prepared = prepare(config, accelerator, processes, resumed=resumed)
            _tell(prepared)
            cluster = None
            if config.train.mode == "async":
                cluster = RayCluster(config.asynchronous)
                ending.callback(cluster.close)
            # After the checks, so that a refused config leaves nothing behind.
            folder = processes.on_main(
                lambda: make_run_folder(config, lock) if resumed is None else resumed.folder
            )
            summary = _train(prepared, folder, cluster)
    if processes.count > 1:
        accelerator.end_training()
    if processes.is_main:
        _print_result(folder, summary)
    return folder


def _tell(prepared: PreparedRun) -> None:
    """Log what the checks found."""
    if prepared.note:
        logger.info("settings: %s", prepared.note)
    if prepared.checkpoint is None and not can_be_extended(prepared.config):
        logger.info("%s", _why_it_ends(prepared.config))
    for line in prepared.hints if prepared.processes.is_main else ():
        logger.warning("%s", line)


def _why_it_ends(config: Config) -> str:
    """Say what is planned for the last step, and how to leave the length of the run open."""
    planned = {}
    if config.optim.schedule != "constant":
        planned["optim.schedule=constant"] = "the learning rate falls to 0"
    if config.sft.final_weight is not None:
        planned["sft.final_weight=null"] = "the weight of targets reaches its last value"
    return (
        f"train.steps cannot be raised later, because {' and '.join(planned.values())} at step "
        f"{config.train.steps}; set {' '.join(planned)} if you may want more steps"
    )


def _train(
    prepared: PreparedRun, folder: RunFolder, cluster: RayCluster | None
) -> list[SummaryRow] | None:
    """Load the models, and train what is left to do.

    Returns:
        Held-out scores before and after; None if the run was stopped.
    """
    config, processes = prepared.config, prepared.processes
    processes.on_main(lambda: _keep_origin(prepared, folder))
    logger.info(
        "run folder: %s (open gallery/index.html in it once the first evaluation is done)",
        folder.path,
    )
    with processes.together():
        scorer = prepared.load_scorer()
        rare = prepared.check_scored(scorer)
        models = prepared.load(scorer)
        if config.train.method == "grpo":
            found = check_code_path(
                models,
                build_batch(config, prepared.prompts.training, 1),
                is_mixed=prepared.accelerator.mixed_precision != "no",
            )
            if found:
                logger.info("self-check passed: %s", found)
    for line in prepared.asked if processes.is_main else ():
        logger.info("%s", line)
    for line in rare if processes.is_main else ():
        logger.warning("%s", line)
    console = Console(stderr=True, quiet=not processes.is_main)
    trainer = build_trainer(
        prepared, models, folder, console, show=refresh_gallery, cluster=cluster
    )
    return trainer.run()


def _keep_origin(prepared: PreparedRun, folder: RunFolder) -> None:
    provenance = describe_provenance(
        prepared.config,
        prepared.model,
        held_out=prepared.prompts.held_out,
        training=prepared.prompts.training,
        devices=_devices_of(prepared),
    )
    done = None if prepared.checkpoint is None else prepared.checkpoint.step
    keep_provenance(folder, provenance, prepared.given, done=done)


def _devices_of(prepared: PreparedRun) -> str:
    """Name the devices of all processes, such as `2 x NVIDIA H100 80GB HBM3`."""
    device, count = prepared.device, prepared.processes.count
    name = f"CPU ({counted(torch.get_num_threads(), 'thread')})"
    if device.type != "cpu":
        name = torch.get_device_module(device).get_device_name(device)
    return f"{count} x {name}" if count > 1 else name


def _check_launch(config: Config, processes: Processes) -> None:
    """Refuse processes that cannot run the config; all but the main one then log only problems."""
    refuse_separate_processes(processes.count, os.environ)
    if not processes.is_main:
        logging.disable(logging.INFO)
    if processes.count > 1 and is_sweep():
        raise ConfigError(
            f"a sweep (-m) was started on {processes.count} processes, whose ties end with its "
            "first run; start its runs one by one"
        )
    if processes.count > 1 and config.train.mode == "async":
        raise ConfigError(
            f"train.mode = 'async': the run was started on {processes.count} processes, and "
            "collectors work for a single one that learns; start it with `glm-grpo train`, or set "
            "train.mode=sync, in which the processes collect and learn together"
        )


def _print_result(folder: RunFolder, summary: list[SummaryRow] | None) -> None:
    if summary is None:
        again = resume_command(folder.path)
        text = Text(f"stopped and saved; continue with {again}")
        Console(stderr=True).print(text, soft_wrap=True)
    results = Console(highlight=False)
    if summary is not None:
        base = base_means(folder)
        results.print(summary_table(summary, title="held-out prompts, before and after", base=base))
        if mixed := describe_mixed_scores(folder):
            results.print(Text(mixed), soft_wrap=True)
    results.print(Text(f"gallery: {folder.gallery_path}"), soft_wrap=True)
    if summary is not None and not is_sweep():
        for line in _next_commands(folder):
            results.print(Text(line), soft_wrap=True)


def _next_commands(folder: RunFolder) -> list[str]:
    """What to do with a finished run; commands can be pasted into a shell."""
    run = shlex.quote(str(folder.path))
    exported = shlex.quote(f"{folder.path}-export")
    return [
        f"to look at it:  glm-grpo gallery {run} --serve",
        f"to compare it:  glm-grpo compare OTHER_RUN {run}",
        f"to train more:  {train_longer(folder, read_config(folder))}",
        f"to use it:      glm-grpo export {run} {exported}",
    ]
