"""`glm-grpo eval`: compare a checkpoint with the base policy, or evaluate that one alone."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from glm_grpo.data.prompts import PromptSource
from glm_grpo.errors import ConfigError
from glm_grpo.models.find import FoundModel, find_model
from glm_grpo.models.quiet import quiet_libraries
from glm_grpo.run.config import read_config
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
from glm_grpo.setup.hints import hint_at_unknown
from glm_grpo.setup.loading import load_models, load_scorer
from glm_grpo.setup.prompts import held_out_batches, read_held_out
from glm_grpo.setup.provenance import describe_provenance
from glm_grpo.setup.rewards import check_metadata, check_terms
from glm_grpo.setup.start import find_start, pin_start
from glm_grpo.studio.gallery import write_gallery
from glm_grpo.studio.held_out.tables import (
    conditions_table,
    report_held_out,
    report_json,
    report_markdown,
    score_tables,
)
from glm_grpo.training.distributed.strategy import make_accelerator
from glm_grpo.training.evaluate import evaluate, weigh_evaluation
from glm_grpo.training.metrics import evaluation_metrics
from glm_grpo.training.models import Models
from glm_grpo.types import Evaluation
from rewards.coverage import check_prompts
from rewards.problems import Problem, describe_problems, known_keys, nearest_keys
from rewards.types import RewardTable

logger = logging.getLogger(__name__)

_EVALUATIONS_OF_BASE = Path("outputs/eval")
"""Usual folder of an evaluation without a run."""

_CHANGEABLE = (
    "data.eval_path",
    *(f"rollout.{name}" for name in ("temperature", "top_p", "top_k", "min_p")),
    *(f"decode.{name}" for name in ("steps", "guidance_scale", "batch_size")),
    *("eval.samples_per_prompt", "eval.seed", "eval.group_by"),
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
            `decode.steps`, `.guidance_scale` and `.batch_size`, `eval.samples_per_prompt`, `.seed`
            and `.group_by`.
        directory: New or empty folder for the result; None: one in `evals/` of the run.

    Returns:
        A run folder with both evaluations, their images and a gallery.
    """
    quiet_libraries()
    found = find_checkpoint(run)
    config = with_absolute_paths(_override(found.config, overrides))
    config = pin_start(config, found.checkpoint.run_state().start_step)
    prepared = _prepare(config)
    for line in changes_since(found, config, prepared.provenance):
        logger.warning("%s", line)
    step = found.checkpoint.step
    folder = _make_folder(directory, found.folder.evals_dir / f"step-{step:06d}")
    models = prepared.load()
    before = prepared.evaluate(models, step=0, base_scores=None)
    models.policy.load_state_tensors(found.evaluated())
    after = prepared.evaluate(models, step=step, base_scores=before.scores)
    write_provenance(folder, prepared.provenance)
    # The gallery would take another number of steps for a run that goes on.
    train = config.train.model_copy(update={"steps": step})
    _record(folder, config.model_copy(update={"train": train}), (before, after))
    return folder


def evaluate_model(config: Config, directory: Path | None = None) -> RunFolder:
    """Evaluate the model of a config on its held-out prompts, without training.

    Args:
        config: Its training prompts are not read.
        directory: New or empty folder for the result; None: `outputs/eval`, or a number behind it.

    Returns:
        A run folder with one evaluation, its images and a gallery.
    """
    quiet_libraries()
    prepared = _prepare(pin_start(with_absolute_paths(config), None))
    folder = _make_folder(directory, _EVALUATIONS_OF_BASE)
    models = prepared.load()
    evaluation = prepared.evaluate(models, step=0, base_scores=None)
    write_provenance(folder, prepared.provenance)
    _record(folder, prepared.config, [evaluation])
    return folder


@dataclass(frozen=True)
class _Prepared:
    """What is evaluated, checked and not loaded."""

    config: Config
    model: FoundModel
    held_out: PromptSource
    provenance: Provenance

    def load(self) -> Models:
        """Load the models, with the weights that a run of the config would start with."""
        config = self.config.without_reference()
        device = make_accelerator().device
        scorer = load_scorer(config, device)
        prompts = (self.held_out[index] for index in range(len(self.held_out)))
        hints = hint_at_unknown(config, "held-out", self.held_out)
        for line in [*hints, *check_prompts(scorer.terms, prompts, set_name="held-out prompts")]:
            logger.warning("%s", line)
        return load_models(config, self.model, device, scorer=scorer, start=find_start(config))

    def evaluate(self, models: Models, *, step: int, base_scores: RewardTable | None) -> Evaluation:
        """Evaluate the policy, whose weights are those of `step`."""
        part = evaluate(models, held_out_batches(self.config, self.held_out), step=step)
        return weigh_evaluation([part], mode=self.config.reward.combine, base_scores=base_scores)


def _prepare(config: Config) -> _Prepared:
    """Check the parts of an evaluation."""
    model = find_model(config.model.path)
    reserved = model.family.check_model(model.path)
    model.family.check_keys(config)
    model.family.check_sizes(model.path, config)
    held_out = read_held_out(config, reserved, partial(check_metadata, config))
    check_terms(config)
    provenance = describe_provenance(config, model, held_out=held_out, training=None)
    return _Prepared(config, model, held_out, provenance)


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


def _make_folder(directory: Path | None, usual: Path) -> RunFolder:
    """Make the folder of the result before anything is sampled.

    Args:
        usual: Used if `directory` is None, with a number behind it unless it is free.
    """
    if directory is None:
        paths = (Path(f"{usual}-{number}") for number in itertools.count(2))
        directory = next(filter(is_free, itertools.chain([usual], paths)))
    else:
        refuse_taken(directory)
    with storage_errors("write", directory):
        directory.mkdir(parents=True, exist_ok=True)
    return RunFolder(directory)


def _record(folder: RunFolder, config: Config, ends: Sequence[Evaluation]) -> None:
    write_atomically(folder.config_path, to_yaml(config).encode())
    for evaluation in ends:
        write_evaluation(folder, evaluation, combine=config.reward.combine)
        append_metrics(folder, evaluation.step, evaluation_metrics(evaluation))
    write_gallery(folder, summarise(folder))
    report = report_held_out(folder, config)
    if report is not None:
        write_atomically(folder.table_json_path, report_json(report).encode())
        write_atomically(folder.table_markdown_path, report_markdown(report).encode())


def evaluation_tables(folder: RunFolder) -> list[Table]:
    """Tables of what `evaluate_run` or `evaluate_model` stored, for the terminal."""
    report = report_held_out(folder, read_config(folder))
    if report is None:
        return []
    summary = summarise(folder)
    title = f"held-out prompts, {' and '.join(report.models)}"
    tables = [summary_table(summary, title=title)] if summary else []
    return [*tables, *score_tables(report), conditions_table(report)]


def _override(config: Config, overrides: Sequence[str]) -> Config:
    values = config.model_dump(mode="json")
    # Only training uses it; evaluations use all steps, which may now be fewer than this.
    values["decode"]["rollout_steps"] = None
    problems, known = [], known_keys(Config)
    for key, value in map(parse_override, overrides):
        if key in _CHANGEABLE:
            set_key(values, key, value)
            continue
        rule = "is not a key that eval can change: the model and the reward come from the run"
        remedy = f"leave it out, or use one of {', '.join(_CHANGEABLE)}"
        # A key that the config has is not a slip.
        if key not in known and (meant := nearest_keys(key, _CHANGEABLE)):
            remedy = f"did you mean {' or '.join(meant)}?"
        problems.append(Problem(key, value, rule, remedy))
    if problems:
        raise ConfigError(describe_problems(problems))
    return validate_config(values, is_stored=True)


def summary_table(
    rows: Sequence[SummaryRow], *, title: str, base: Mapping[str, float] | None = None
) -> Table:
    """Before and after on the held-out prompts, for the terminal.

    Args:
        base: Means before the run that this one began with; None or empty: no such column.
    """
    columns: tuple[str, ...] = ("", "before", "after", "change", "95 % interval")
    cells = tuple(change_row(row) for row in rows)
    if base:
        columns = ("", "base", *columns[1:])
        cells = tuple((name, f"{base[name]:z.3f}", *others) for name, *others in cells)
    return Table(title, columns, cells, interval_note(row.low for row in rows))
