"""Open run folders and prepare runs without the checks that a test does not need."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate import Accelerator

from glm_grpo.config import Config
from glm_grpo.models.find import find_model
from glm_grpo.run.checkpoints import Checkpoint, load_checkpoint
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.lock import RunLock
from glm_grpo.run.resume import find_resumed, make_run_folder
from glm_grpo.setup.prepared_run import PreparedRun
from glm_grpo.setup.prompts import Prompts, read_prompts
from glm_grpo.training.distributed.processes import ALONE


@dataclass(frozen=True)
class OpenedRun:
    """A locked run folder."""

    folder: RunFolder
    lock: RunLock
    checkpoint: Checkpoint | None
    is_finished: bool


def open_run(config: Config) -> OpenedRun:
    """Lock the run that goes on, or the folder of a new one, as the start of a run does."""
    lock = RunLock()
    resumed = find_resumed(config, lock)
    if resumed is None:
        return OpenedRun(make_run_folder(config, lock), lock, None, is_finished=False)
    checkpoint = None if resumed.checkpoint is None else load_checkpoint(resumed.checkpoint)
    return OpenedRun(resumed.folder, lock, checkpoint, resumed.is_finished)


def prompts_of(config: Config) -> Prompts:
    """Both prompt sets, whether or not the reward can score them."""
    model = find_model(config.model.path)
    return read_prompts(config, model.family.check_model(model.path))


def prepared_run(
    config: Config, prompts: Prompts, checkpoint: Checkpoint | None = None
) -> PreparedRun:
    """A run of prompts that nobody checked, on the CPU."""
    return PreparedRun(
        given=config,
        config=config,
        note="",
        accelerator=Accelerator(),
        processes=ALONE,
        model=find_model(config.model.path),
        planner=None,
        prompts=prompts,
        start=None,
        checkpoint=checkpoint,
        memory="",
        hints=[],
        asked=[],
    )
