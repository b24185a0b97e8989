"""What is known of a run before its models are loaded, and the checks that it passed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils import get_int_from_env

from glm_grpo.collectors.ray_cluster import require_ray
from glm_grpo.config import Config, effective_config
from glm_grpo.errors import Errors
from glm_grpo.models.base import ReservedTokens
from glm_grpo.models.find import FoundModel, find_model
from glm_grpo.models.planning import Parallelism, Planner
from glm_grpo.plan.processes import refuse_for_processes
from glm_grpo.run.checkpoints import Checkpoint, load_checkpoint
from glm_grpo.run.finding import FoundCheckpoint
from glm_grpo.run.resume import ResumedRun
from glm_grpo.run.trackers import check_trackers
from glm_grpo.setup.hints import (
    hint_at_bfloat16,
    hint_at_credit,
    hint_at_length,
    hint_at_prompts,
    hint_at_tags,
    list_asked,
)
from glm_grpo.setup.loading import load_models, load_scorer
from glm_grpo.setup.memory import check_fit
from glm_grpo.setup.prompts import Prompts, read_prompts
from glm_grpo.setup.rewards import (
    check_metadata,
    check_rows,
    check_scored,
    check_targets,
    check_terms,
    check_used,
)
from glm_grpo.setup.start import find_start, pin_start
from glm_grpo.training.distributed.processes import ALONE, Processes
from glm_grpo.training.distributed.strategy import has_shards, make_accelerator
from glm_grpo.training.models import Models
from rewards.score import Scorer


@dataclass(frozen=True)
class PreparedRun:
    """A run that can start: checked, and nothing of it loaded or written yet; from `prepare`.

    Attributes:
        given: Config as given, which the run folder keeps.
        config: Config that the run works with: memory and speed keys have values that work, and
            `model.start_from` names a checkpoint.
        note: Line about adjusted keys; empty if all work as given.
        accelerator: Device and engine.
        processes: Processes of the run.
        model: Files and family of the model.
        planner: Planner of the model; None if its sizes are unknown.
        prompts: Both prompt sets.
        start: Checkpoint whose weights policy and reference begin with; None: the model's own, or
            those of `checkpoint`.
        checkpoint: Checkpoint that a resumed run continues from; None: the run begins.
        memory: Description of the memory needed and available.
        hints: Hints on settings and prompts that are probably not as intended.
        asked: Lines on the texts and objects that the prompts ask for.
    """

    given: Config
    config: Config
    note: str
    accelerator: Accelerator
    processes: Processes
    model: FoundModel
    planner: Planner | None
    prompts: Prompts
    start: FoundCheckpoint | None
    checkpoint: Checkpoint | None
    memory: str
    hints: list[str]
    asked: list[str]

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        device: torch.device = self.accelerator.device
        return device

    def load_scorer(self) -> Scorer:
        """Load the reward terms, so that prompts are checked before gigabytes are downloaded."""
        return load_scorer(self.config, self.device)

    def load(self, scorer: Scorer | None = None) -> Models:
        """Load the models, with the weights of `start`; a resumed run's own come later.

        Args:
            scorer: Reward terms; None: load them, too.
        """
        return load_models(
            self.config,
            self.model,
            self.device,
            scorer=scorer,
            start=self.start,
            is_sharded=has_shards(self.accelerator),
        )

    def check_scored(self, scorer: Scorer) -> list[str]:
        """Refuse prompts that no term can score; returns lines on terms that apply to few."""
        return check_scored(self.config, scorer, self.prompts)


def prepare(
    config: Config,
    accelerator: Accelerator | None = None,
    processes: Processes = ALONE,
    *,
    resumed: ResumedRun | None = None,
) -> PreparedRun:
    """Check what needs no loaded model, cheapest checks first, and leave nothing behind.

    What a type or a schema can refuse was refused earlier, when the config was validated.

    Args:
        accelerator: Device and engine; None: those of a single process.
        processes: Processes of the run, which all call this.
        resumed: The run that goes on; None: a new one.

    Raises:
        PeerError: A check failed in another process.
    """
    accelerator = accelerator or make_accelerator()
    parallelism = _parallelism(accelerator, processes)
    given = config
    with processes.together():
        refuse_for_processes(config, parallelism)
        check_trackers(config.trackers)
        if config.train.mode == "async":
            require_ray()
        effective = effective_config(
            config, processes=parallelism.count, is_sharded=parallelism.is_sharded
        )
        checkpoint, begun = None, None
        if resumed is not None and resumed.checkpoint is not None:
            checkpoint = load_checkpoint(resumed.checkpoint)
            # Reports a misfit before a model is loaded.
            begun = checkpoint.run_state().start_step
    config = pin_start(effective.config, begun, processes)
    with processes.together():
        start = None if _holds_start(checkpoint, config) else find_start(config)
        model, prompts = _check_parts(config)
        planner = model.known_planner()
        memory = check_fit(
            config, planner, [each for _, each in prompts.named()], accelerator.device, parallelism
        )
    return PreparedRun(
        given=given,
        config=config,
        note=effective.note,
        accelerator=accelerator,
        processes=processes,
        model=model,
        planner=planner,
        prompts=prompts,
        start=start,
        checkpoint=checkpoint,
        memory=memory,
        hints=[
            *model.family.hint_at_size(model.path, config),
            *hint_at_bfloat16(config, accelerator.device),
            *hint_at_credit(config),
            *hint_at_prompts(config, prompts, model.family.TEXT_RULE),
            *hint_at_length(prompts, planner),
            *hint_at_tags(prompts),
        ],
        asked=list_asked(config, prompts),
    )


def _parallelism(accelerator: Accelerator, processes: Processes) -> Parallelism:
    return Parallelism(
        count=processes.count,
        is_sharded=has_shards(accelerator),
        is_mixed=accelerator.mixed_precision != "no",
        # Set by torchrun, with which accelerate starts processes.
        on_machine=get_int_from_env(["LOCAL_WORLD_SIZE"], 1),
    )


def _holds_start(checkpoint: Checkpoint | None, config: Config) -> bool:
    """Whether the checkpoint to resume from contains everything the run started with."""
    if checkpoint is None:
        return False
    return not config.needs_reference or "reference" in checkpoint.tensors


def _check_parts(config: Config) -> tuple[FoundModel, Prompts]:
    """Check model, prompts and terms, none of which needs another."""
    errors, reserved = Errors(), ReservedTokens()
    with errors.collecting():
        model = find_model(config.model.path)
        # First, because a path that is no model belongs to no family.
        reserved = model.family.check_model(model.path)
        model.family.check_keys(config)
        model.family.check_sizes(model.path, config)
    with errors.collecting():
        prompts = read_prompts(config, reserved, partial(check_metadata, config))
        check_used(config, prompts)
        check_targets(config, prompts)
        check_rows(config, prompts)
    with errors.collecting():
        check_terms(config)
    errors.raise_all()
    return model, prompts
