"""Build the trainer of a run, and restore its checkpoint if there is one."""

from __future__ import annotations

from rich.console import Console

from glm_grpo.collectors.ray_cluster import RayCluster
from glm_grpo.config import Config
from glm_grpo.plan.floors import work_of_run
from glm_grpo.run.checkpoints import forget_checkpoints_after, prune_checkpoints
from glm_grpo.run.config import read_config
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.run_state import RunState
from glm_grpo.run.tables import read_metrics
from glm_grpo.run.trackers import Trackers
from glm_grpo.run.writing import truncate_after
from glm_grpo.setup.collectors import start_collectors
from glm_grpo.setup.learner import build_learner
from glm_grpo.setup.prepared_run import PreparedRun
from glm_grpo.setup.prompts import held_out_batches
from glm_grpo.training.loop import Trainer
from glm_grpo.training.models import Models
from glm_grpo.training.monitors.hacking import HackingMonitor
from glm_grpo.training.progress import Progress
from glm_grpo.training.records import Records, ShowRun
from glm_grpo.training.saver import CheckpointSaver
from glm_grpo.training.step import TrainingStep


def build_trainer(
    prepared: PreparedRun,
    models: Models,
    folder: RunFolder,
    console: Console,
    *,
    show: ShowRun,
    cluster: RayCluster | None = None,
) -> Trainer:
    """Build optimizer, schedule, records and loop, and restore the checkpoint if there is one.

    Args:
        folder: Open run folder.
        show: Called after a step or an evaluation is stored.
        cluster: Cluster of the collectors; None if this process collects.
    """
    config, processes = prepared.config, prepared.processes
    learner = build_learner(prepared, models)
    state = learner.state
    records = Records(
        folder,
        processes,
        lambda: _open_files(config, folder, state),
        config=config,
        show=show,
        work=work_of_run(
            config, prepared.planner, prepared.prompts.training, prepared.device, processes.count
        ),
    )
    progress = Progress(
        total=config.train.steps,
        done=state.step,
        console=console,
        base=next(iter(read_metrics(folder)), None),
    )
    saver = CheckpointSaver(
        folder,
        learner,
        processes=processes,
        keep=config.train.keep_checkpoints,
        finish_records=records.finish,
        announce=progress.phase,
    )
    collectors = None
    if cluster is not None:
        # They start to work at once, and only the trainer ends them.
        collectors = start_collectors(prepared, models, cluster, first_step=state.step + 1)
    return Trainer(
        TrainingStep(
            config=config,
            models=models,
            learner=learner,
            prompts=prepared.prompts.training,
            records=records,
            processes=processes,
            collectors=collectors,
        ),
        evaluation_batches=held_out_batches(config, prepared.prompts.held_out, processes),
        saver=saver,
        progress=progress,
    )


def _open_files(config: Config, folder: RunFolder, at: RunState) -> tuple[Trackers, HackingMonitor]:
    """Remove what was recorded after the step where the run resumes; open trackers and monitor."""
    # A run that has finished no step repeats its evaluation of step 0.
    last = at.step if at.step > 0 else -1
    # First, because a checkpoint whose records are gone could not be resumed from.
    forget_checkpoints_after(folder, at.step)
    truncate_after(folder, last)
    # A kill may have come between writing a checkpoint and removing old ones.
    prune_checkpoints(folder, config.train.keep_checkpoints, at.best_step)
    # A resumed run keeps its original name.
    about = read_config(folder).run
    trackers = Trackers(
        config.trackers, folder, config.model_dump(mode="json"), about, first_step=last + 1
    )
    return trackers, HackingMonitor(
        folder,
        watch=config.reward.watch,
        evaluated=[name for name, term in config.reward.terms.items() if term.when == "evaluation"],
        margin=config.reward.canary_margin,
        outside=at.canaries_outside,
    )
