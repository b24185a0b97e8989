"""`glm-grpo eval`: compare a checkpoint with the untrained policy."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from glm_grpo.config import (
    Config,
    flatten,
    parse_override,
    set_key,
    to_yaml,
    validate_config,
    with_absolute_paths,
)
from glm_grpo.errors import ConfigError
from glm_grpo.models.find import find_model
from glm_grpo.models.quiet import quiet_libraries
from glm_grpo.run.figures import Table, change_row, interval_note
from glm_grpo.run.finding import FoundCheckpoint, find_checkpoint
from glm_grpo.run.folder import (
    RunFolder,
    is_free,
    refuse_taken,
    storage_errors,
    write_atomically,
)
from glm_grpo.run.provenance import (
    Provenance,
    changed_prompts,
    changed_versions,
    describe_changes,
    read_provenance,
    write_provenance,
)
from glm_grpo.run.summaries import summarise
from glm_grpo.run.tables import SummaryRow
from glm_grpo.run.writing import append_metrics, write_evaluation
from glm_grpo.setup.loading import load_models
from glm_grpo.setup.prompts import held_out_batches, read_prompt_set
from glm_grpo.setup.provenance import describe_provenance
from glm_grpo.setup.start import find_start, pin_start
from glm_grpo.studio.gallery import write_gallery
from glm_grpo.training.distributed.strategy import make_accelerator
from glm_grpo.training.evaluate import evaluate, weigh_evaluation
from glm_grpo.training.metrics import evaluation_metrics
from glm_grpo.types import Evaluation
from rewards.coverage import check_prompts
from rewards.problems import Problem, describe_problems

logger = logging.getLogger(__name__)

_CHANGEABLE = (
    "data.eval_path",
    *(f"rollout.{name}" for name in ("temperature", "top_p", "top_k", "min_p")),
    *(f"decode.{name}" for name in ("steps", "guidance_scale", "batch_size")),
    *("eval.samples_per_prompt", "eval.seed"),
)
"""Keys of prompts, sampling and decoding; the stored config decides which weights are evaluated."""


def evaluate_run(
    run: Path, overrides: Sequence[str] = (), directory: Path | None = None
) -> RunFolder:
    """Compare a run's newest checkpoint, or the one the path names, with the run's start.

    Args:
        run: Run folder, or a checkpoint in it.
        overrides: `key=value` for prompts, sampling or decoding, applied to both sides:
            `data.eval_path`, `rollout.temperature`, `.top_p`, `.top_k` and `.min_p`,
            `decode.steps`, `.guidance_scale` and `.batch_size`, `eval.samples_per_prompt` and
            `.seed`.
        directory: New or empty folder for the result; None: one in `evals/` of the run.

    Returns:
        A run folder with both evaluations, their images and a gallery.
    """
    quiet_libraries()
    found = find_checkpoint(run)
    config = with_absolute_paths(_override(found.config, overrides))
    model = find_model(config.model.path)
    reserved = model.family.check_model(model.path)
    model.family.check_keys(config)
    held_out = read_prompt_set(config.data.eval_path, config, reserved)
    config = pin_start(config, found.checkpoint.run_state().start_step)
    provenance = describe_provenance(config, model, held_out=held_out, training=None)
    for line in changes_since(found, config, provenance):
        logger.warning("%s", line)
    folder = _make_folder(found, directory)
    models = load_models(
        config.without_reference(), model, make_accelerator().device, start=find_start(config)
    )
    prompts = (held_out[index] for index in range(len(held_out)))
    for line in check_prompts(models.scorer.terms, prompts, set_name="held-out prompts"):
        logger.warning("%s", line)
    batches = held_out_batches(config, held_out)
    mode = config.reward.combine
    part = evaluate(models, batches, step=0)
    before = weigh_evaluation([part], mode=mode, untrained=None)
    models.policy.load_state_tensors(found.evaluated())
    part = evaluate(models, batches, step=found.checkpoint.step)
    after = weigh_evaluation([part], mode=mode, untrained=before.scores)
    write_provenance(folder, provenance)
    _record(folder, config, (before, after))
    return folder


def changes_since(found: FoundCheckpoint, config: Config, provenance: Provenance) -> list[str]:
    """Lines on what is no longer as it was when the run began, so that scores may differ."""
    stored = read_provenance(found.folder)
    if stored is None:
        return []
    # The training prompts are not read.
    stored = replace(stored, training={})
    changes = describe_changes(stored, provenance, flatten(config.model_dump(mode="json")))
    changes += changed_versions(stored.versions, provenance.versions)
    if config.data.eval_path == found.config.data.eval_path:
        held_out = changed_prompts(stored.held_out, provenance.held_out)
        changes += [f"data.eval_path = {config.data.eval_path}: {held_out}"] if held_out else []
    return [f"not as in {found.folder.path}: {change}" for change in changes]


def _make_folder(found: FoundCheckpoint, directory: Path | None) -> RunFolder:
    """Make the folder of the result before anything is sampled."""
    if directory is None:
        name = found.folder.evals_dir / f"step-{found.checkpoint.step:06d}"
        paths = (Path(f"{name}-{number}") for number in itertools.count(2))
        directory = next(filter(is_free, itertools.chain([name], paths)))
    else:
        refuse_taken(directory)
    with storage_errors("write", directory):
        directory.mkdir(parents=True, exist_ok=True)
    return RunFolder(directory)


def _record(folder: RunFolder, config: Config, ends: Sequence[Evaluation]) -> None:
    # The gallery would take another number of steps for a run that goes on.
    train = config.train.model_copy(update={"steps": ends[-1].step})
    write_atomically(
        folder.config_path, to_yaml(config.model_copy(update={"train": train})).encode()
    )
    for evaluation in ends:
        write_evaluation(folder, evaluation, combine=config.reward.combine)
        append_metrics(folder, evaluation.step, evaluation_metrics(evaluation))
    write_gallery(folder, summarise(folder))


def _override(config: Config, overrides: Sequence[str]) -> Config:
    values = config.model_dump(mode="json")
    # Only training uses it; evaluations use all steps, which may now be fewer than this.
    values["decode"]["rollout_steps"] = None
    problems = []
    for key, value in map(parse_override, overrides):
        if key in _CHANGEABLE:
            set_key(values, key, value)
            continue
        rule = "is not a key that eval can change: the model and the reward come from the run"
        remedy = f"leave it out, or use one of {', '.join(_CHANGEABLE)}"
        problems.append(Problem(key, value, rule, remedy))
    if problems:
        raise ConfigError(describe_problems(problems))
    return validate_config(values, is_stored=True)


def summary_table(
    rows: Sequence[SummaryRow], *, title: str, untrained: Mapping[str, float] | None = None
) -> Table:
    """Before and after on the held-out prompts, for the terminal.

    Args:
        untrained: Means before the run that this one began with; None or empty: no such column.
    """
    columns: tuple[str, ...] = ("", "before", "after", "change", "95 % interval")
    cells = tuple(change_row(row) for row in rows)
    if untrained:
        columns = ("", "untrained", *columns[1:])
        cells = tuple((name, f"{untrained[name]:z.3f}", *others) for name, *others in cells)
    return Table(title, columns, cells, interval_note(row.low for row in rows))
