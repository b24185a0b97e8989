"""Build the trainer of a run, and restore its checkpoint if there is one."""

from __future__ import annotations

from rich.console import Console

from glm_grpo.builders.asynchronous import build_collectors
from glm_grpo.builders.launch import Launch
from glm_grpo.builders.learner import build_learner
from glm_grpo.builders.prompts import Prompts, build_evaluation_batches
from glm_grpo.config import Config
from glm_grpo.data.prompts import PromptSource
from glm_grpo.run.checkpoints import forget_checkpoints_after, prune_checkpoints
from glm_grpo.run.config import read_config
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.recorder import Recorder
from glm_grpo.run.run_state import RunState
from glm_grpo.run.tables import read_metrics
from glm_grpo.training.learner import Learner
from glm_grpo.training.loop import Trainer
from glm_grpo.training.monitors.hacking import HackingMonitor
from glm_grpo.training.phase import Models
from glm_grpo.training.progress import Progress
from glm_grpo.training.records import Records, ShowRun
from glm_grpo.training.resume import OpenedRun
from glm_grpo.training.saver import CheckpointSaver
from glm_grpo.training.steps import RewardStep, SupervisedStep


def build_trainer(
    config: Config,
    models: Models,
    prompts: Prompts,
    opened: OpenedRun,
    launch: Launch,
    console: Console,
    *,
    show: ShowRun,
) -> Trainer:
    """Build optimizer, schedule, records and loop, and restore the checkpoint if there is one.

    Args:
        show: Called after a step or an evaluation is stored.
    """
    folder, processes = opened.folder, launch.processes
    learner = build_learner(config, models, opened.checkpoint, launch)
    state = learner.state
    records = Records(
        folder,
        processes,
        lambda: _open_files(config, folder, state),
        combine=config.reward.combine,
        show=show,
        work=launch.work,
    )
    progress = Progress(
        total=config.train.steps,
        done=state.step,
        console=console,
        untrained=next(iter(read_metrics(folder)), None),
    )
    saver = CheckpointSaver(
        folder,
        learner,
        processes=processes,
        keep=config.train.keep_checkpoints,
        finish_records=records.finish,
        announce=progress.phase,
    )
    return Trainer(
        config,
        models,
        learner,
        step=_build_step(config, models, prompts.training, learner, records, launch),
        evaluation_batches=build_evaluation_batches(config, prompts.held_out, processes),
        records=records,
        saver=saver,
        progress=progress,
        processes=processes,
    )


def _build_step(
    config: Config,
    models: Models,
    prompts: PromptSource,
    learner: Learner,
    records: Records,
    launch: Launch,
) -> RewardStep | SupervisedStep:
    """Build the step; collectors start to work at once, and only the trainer ends them."""
    if config.train.method == "sft":
        return SupervisedStep(config, models, learner, prompts, records, launch.processes)
    collectors = None
    if launch.cluster is not None:
        first_step = learner.state.step + 1
        collectors = build_collectors(
            config, models, prompts, launch.cluster, first_step=first_step
        )
    return RewardStep(config, models, learner, prompts, records, launch.processes, collectors)


def _open_files(config: Config, folder: RunFolder, at: RunState) -> tuple[Recorder, HackingMonitor]:
    """Open the recorder, truncated to the step where the run resumes, and the hacking monitor."""
    recorder = Recorder(
        folder,
        trackers=config.trackers,
        config=config.model_dump(mode="json"),
        # A resumed run keeps its original name.
        about=read_config(folder).run,
        combine=config.reward.combine,
    )
    # First, because a checkpoint whose records are gone could not be resumed from.
    forget_checkpoints_after(folder, at.step)
    # A run that has finished no step repeats its evaluation of step 0.
    recorder.truncate_after(at.step if at.step > 0 else -1)
    # A kill may have come between writing a checkpoint and removing old ones.
    prune_checkpoints(folder, config.train.keep_checkpoints, at.best_step)
    return recorder, HackingMonitor(
        folder,
        watch=config.reward.watch,
        evaluated=[name for name, term in config.reward.terms.items() if term.when == "evaluation"],
        margin=config.reward.canary_margin,
        outside=at.canaries_outside,
    )
