"""The Python API: the commands of the command line, for scripts and notebooks.

The examples build on each other, and the tests run them.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from numbers import Integral
from pathlib import Path

import pandas
from PIL import Image

from glm_grpo.commands.eval import evaluate_run
from glm_grpo.commands.train import run_training
from glm_grpo.config import Config, compose_config, validate_config
from glm_grpo.errors import ConfigError, StorageError
from glm_grpo.output import counted
from glm_grpo.run.config import read_config
from glm_grpo.run.folder import RunFolder, read_image
from glm_grpo.run.summaries import summarise
from glm_grpo.run.tables import (
    SummaryRow,
    evaluation_steps,
    read_evaluation,
    read_metrics,
    read_table,
    stored_steps,
)
from glm_grpo.studio.rescore.rescore import Rescoring
from glm_grpo.studio.rescore.rescore import rescore as rescore_folder
from rewards.config import with_functions
from rewards.terms.custom import ScoringFunction


@dataclass(frozen=True)
class Run:
    """Stored results of a run; tables are read on access.

    Attributes:
        path: The run folder.
        config: Config that it was started with, every key resolved.
    """

    path: Path
    config: Config

    def __repr__(self) -> str:
        steps = counted(len(self.steps), "step")
        evaluations = counted(len(self.evaluation_steps), "evaluation")
        return f"Run({str(self.path)!r}, {steps}, {evaluations})"

    def _repr_html_(self) -> str:
        summary = self.summary()
        if summary.empty:
            return f"<p>{escape(repr(self))}</p>"
        table = summary.to_html(float_format="%.3f", na_rep="")
        return f"<p>{escape(repr(self))}, held-out prompts before and after:</p>{table}"

    @property
    def gallery(self) -> Path:
        """Path of the HTML page with its samples and scores."""
        return self._folder.gallery_path

    @property
    def metrics(self) -> pandas.DataFrame:
        """Metrics, a row per step and a column per metric (docs/reference/metrics.md).

        Step 0 is the evaluation of the base model, so only `eval/...` has values there; other
        steps have NaN in `eval/...` unless they were evaluated.
        """
        return pandas.DataFrame(read_metrics(self._folder)).set_index("step")

    @property
    def steps(self) -> list[int]:
        """Steps that have a rollout, in order."""
        return stored_steps(self._folder.rollouts_dir)

    @property
    def evaluation_steps(self) -> list[int]:
        """Steps after which the held-out prompts were evaluated, in order."""
        return evaluation_steps(self._folder)

    def rollout(self, step: int) -> pandas.DataFrame:
        """Images sampled and scored in a step, one row each.

        Args:
            step: One of `steps`.

        Returns:
            Columns `prompt_id`, `prompt`, `sample`, `image`, `raw/<term>` (missing if the term does
            not apply or refused the image), `total`, `advantage`, `token_ids` and others.

        Raises:
            StorageError: There is no such step, or its table is damaged.
        """
        _refuse_absent(step, self.steps, "rollout")
        return read_table(self._folder.rollout_path(step)).to_pandas()

    def evaluation(self, step: int) -> pandas.DataFrame:
        """Images of the held-out prompts after a step, one row each; columns as in `rollout`.

        Args:
            step: One of `evaluation_steps`.

        Raises:
            StorageError: There is no such evaluation, or its table is damaged.
        """
        _refuse_absent(step, self.evaluation_steps, "evaluation")
        return read_evaluation(self._folder, step).to_pandas()

    def image(self, path: str) -> Image.Image:
        """Load a stored image.

        Args:
            path: Value of the columns `image` or `target` in the tables.

        Raises:
            StorageError: It is outside the run's images, missing or damaged.
        """
        if not isinstance(path, str):
            raise StorageError(
                "an image is named by a value of the column 'image' or 'target', not "
                f'{type(path).__name__}; write run.image(row["image"])'
            )
        return read_image(self._folder.image_path(path))

    def summary(self) -> pandas.DataFrame:
        """Compare the held-out prompts before and after: the first and the last stored evaluation.

        Returns:
            A row per term and one for the total; columns `before`, `after`, `difference` and the
            ends `low` and `high` of its 95 % interval. Empty if there are fewer than two
            evaluations.

        Raises:
            StorageError: An evaluation is damaged.
        """
        return _as_frame(summarise(self._folder))

    @property
    def _folder(self) -> RunFolder:
        return RunFolder(self.path)


def load_config(
    name: str | None = None, *overrides: str, config_dir: str | Path | None = None
) -> Config:
    """Compose and check a config, as `glm-grpo train --config-name NAME key=value ...` does.

    Examples:
        >>> from glm_grpo import load_config
        >>> config = load_config("tiny", "train.steps=2", "ocr=0.5", "run_dir=my-run")
        >>> config.train.steps, config.reward.terms["ocr"].weight
        (2, 0.5)

    Args:
        name: Name of a packaged config, or of one in `config_dir`; None: `config` if `config_dir`
            has one, else `tiny`.
        overrides: As on the command line; `ocr=0.5` means `reward.terms.ocr.weight=0.5`.
        config_dir: Your own config folder, such as one that `glm-grpo init` wrote.

    Raises:
        ConfigError: The name or a key is unknown, or a value is refused; the message says what to
            write.
    """
    if isinstance(name, str) and "=" in name:
        raise ConfigError(
            f"{name!r} is an override; the first argument is the name of a config, or None for the "
            f"default; write load_config(None, {name!r})"
        )
    _refuse_other_forms([name or "", *overrides])
    try:
        return compose_config(
            None if config_dir is None else _expanded(config_dir), name, overrides
        )
    except ConfigError as error:
        if config_dir is None and name is not None and (folder := _own_folder(Path(name))):
            raise ConfigError(
                f"{name!r} is no packaged config; write load_config(config_dir={folder!r})"
            ) from None
        # Dozens of Hydra's and pydantic's frames would hide the message in a notebook.
        raise error.with_traceback(None) from None


def _own_folder(path: Path) -> str:
    """The config folder that a path names, itself or by its file; empty if there is none."""
    folder = path.parent if path.suffix == ".yaml" and path.is_file() else path
    return str(folder) if folder != Path() and folder.is_dir() else ""


def train(config: Config, rewards: Mapping[str, ScoringFunction | None] | None = None) -> Run:
    """Train according to a config, in this process; prints progress and the result.

    Ctrl-C (in a notebook: interrupt) ends the run after the current step and saves it. Progress is
    the log of `glm_grpo`: `logging.getLogger("glm_grpo").setLevel(logging.WARNING)` silences it.

    Examples:
        >>> from glm_grpo import load_config, train
        >>> small = ("rollout.prompts_per_step=2", "rollout.group_size=4", "train.steps=2")
        >>> quick = ("eval.samples_per_prompt=1", "decode.steps=1", "trackers=[]")
        >>> run = train(load_config("tiny", *small, *quick, "run_dir=my-run"))
        >>> len(run.rollout(2))
        8

    Args:
        config: Config from `load_config`. `config.run_dir` names the folder of the run.
        rewards: Scoring functions of your own by the name of their term, as in
            `{"sharp": sharpness}`; each gets prompts and images UInt8 [N, 3, H, W], and returns N
            scores, Float32 [N]. They join the terms of the config with weight 1, so totals can
            exceed 1; a function replaces a term of the same name and keeps its weight. None leaves
            a term out: `{**dict.fromkeys(config.reward.terms), "sharp": sharpness}` trains on the
            function alone. Other processes (`glm-grpo eval`, a resumed run) must be able to import
            the function, so a lambda works only in this process.

    Returns:
        The run, as from `load_run`.

    Raises:
        ConfigError: The config does not fit the machine, or the folder contains another run.
        GlmGrpoError, RewardError: Reading, loading or writing failed.
    """
    if not isinstance(config, Config):
        raise ConfigError(
            f'{config!r:.100} is not a config; write train(load_config("tiny", "train.steps=2"))'
        )
    if rewards:
        config = _with_rewards(config, rewards)
    with _log_printed():
        return load_run(run_training(config).path)


class _PrintedLog(logging.Handler):
    """Write to the present `sys.stdout`, which progress bars replace."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stdout.write(f"{self.format(record)}\n")


@contextmanager
def _log_printed() -> Iterator[None]:
    """Print our log as the command does, unless the caller has configured it."""
    loggers = [logging.getLogger(name) for name in ("glm_grpo", "rewards")]
    if any(each.level != logging.NOTSET or each.isEnabledFor(logging.INFO) for each in loggers):
        yield
        return
    handler = _PrintedLog()
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        # Libraries give the root logger handlers with formats of their own.
        logger.propagate = False
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)
            logger.propagate = True


def _with_rewards(config: Config, rewards: Mapping[str, ScoringFunction | None]) -> Config:
    values = config.model_dump(mode="json")
    values["reward"] = with_functions(values["reward"], rewards)
    return validate_config(values)


def load_run(path: str | Path) -> Run:
    """Open the stored results of a run, even of a stopped or crashed one; loads no model.

    Examples:
        >>> from glm_grpo import load_run
        >>> run = load_run("my-run")
        >>> run.steps, run.evaluation_steps
        ([1, 2], [0, 2])
        >>> best = run.rollout(1).sort_values("total").iloc[-1]
        >>> run.image(best.image).size
        (128, 128)

    Args:
        path: The run folder.

    Raises:
        CheckpointError: The folder contains no run.
        ConfigError: Its config is damaged.
    """
    folder = _expanded(path)
    return Run(folder, read_config(RunFolder(folder)))


def rescore(run: Run | str | Path, *overrides: str) -> Rescoring:
    """Compute what other reward weights would have changed in a run; loads no model.

    Examples:
        >>> from glm_grpo import rescore
        >>> rescoring = rescore("my-run", "ocr=0.9", "lpips=0")
        >>> rescoring.images, rescoring.groups
        (16, 4)
        >>> [term.name for term in rescoring.terms]
        ['lpips', 'ssim', 'ocr', 'aesthetic']

    Args:
        run: Run, or its folder.
        overrides: `ocr=0.5`, `reward.combine=normalize_then_sum`, `advantage.clip=null` and so on;
            without any, the run's own weights.

    Returns:
        Groups whose winner changes, shares of the terms, and the images that gain or lose most.

    Raises:
        ConfigError: An override is refused.
        CheckpointError: The folder contains no run.
        StorageError: A table is damaged.
    """
    _refuse_other_forms(overrides)
    return rescore_folder(RunFolder(_path_of(run)), overrides)


def evaluate(
    run: Run | str | Path, *overrides: str, directory: str | Path | None = None
) -> pandas.DataFrame:
    """Sample the held-out prompts with the base model and the newest checkpoint of a run.

    Images and scores are kept in a new folder in `evals/` of the run, or in `directory`;
    `load_run` opens it.

    Examples:
        >>> from glm_grpo import evaluate
        >>> evaluate("my-run").index.tolist()
        ['lpips', 'ssim', 'ocr', 'ocr_exact', 'aesthetic', 'total']

    Args:
        run: Run, its folder, or one of its checkpoints.
        overrides: Other prompts (`data.eval_path=other.jsonl`), sampling or decoding, such as
            `rollout.min_p=0.02`.
        directory: New or empty folder for the result; None: one in the run.

    Returns:
        Table as from `Run.summary`.

    Raises:
        CheckpointError: There is no intact checkpoint.
        ConfigError: An override is refused.
        GlmGrpoError, RewardError: Reading, loading or writing failed.
    """
    _refuse_other_forms(overrides)
    target = None if directory is None else _expanded(directory)
    return _as_frame(summarise(evaluate_run(_path_of(run), overrides, target)))


def _refuse_other_forms(overrides: Sequence[object]) -> None:
    """Refuse overrides in a list or a mapping."""
    for override in overrides:
        if not isinstance(override, str):
            raise ConfigError(
                f"{override!r:.100}: each override must be a string, as on the command line; write "
                '"train.steps=2", "ocr=0.5", or *overrides for a list of them'
            )


def _path_of(run: Run | str | Path) -> Path:
    return run.path if isinstance(run, Run) else _expanded(run)


def _expanded(path: str | Path) -> Path:
    return Path(os.path.expanduser(path))


def _refuse_absent(step: int, there: Sequence[int], what: str) -> None:
    # Indices and columns of tables are of numpy's own types.
    if not isinstance(step, Integral):
        raise StorageError(f"step must be a whole number, not {step!r:.100}")
    if step in there:
        return
    if not there:
        raise StorageError(f"step {step} has no {what}; this run has none yet")
    first, last = there[0], there[-1]
    is_whole = len(there) == last - first + 1
    steps = f"{first} to {last}" if is_whole else ", ".join(map(str, there))
    raise StorageError(f"step {step} has no {what}; this run has steps {steps}")


def _as_frame(rows: list[SummaryRow]) -> pandas.DataFrame:
    columns = [field.name for field in dataclasses.fields(SummaryRow)]
    return pandas.DataFrame(map(dataclasses.astuple, rows), columns=columns).set_index("name")
