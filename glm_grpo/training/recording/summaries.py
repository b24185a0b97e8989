"""Before against after on the held-out prompts, from evaluations that were made or stored."""

from __future__ import annotations

import numpy
import pandas
import pyarrow
import torch
from jaxtyping import Float32
from torch import Tensor

from glm_grpo.errors import StorageError
from glm_grpo.gallery.summary import SummaryRow
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import RAW, evaluation_steps, read_evaluation
from glm_grpo.training.recording.statistics import paired_bootstrap
from glm_grpo.types import Evaluation

_BOOTSTRAP_SEED = 0
_COLUMNS = ("step", "prompt_id", RAW, "total")


def summarise(folder: RunFolder) -> list[SummaryRow]:
    """Every term and the total before and after, with a paired 95 % interval over prompts.

    Reads the first and the last stored evaluation, so it works for a run that was interrupted. A
    prompt's value is the mean over its samples; a term counts the prompts it applies to.
    `ocr_exact` is the share of images whose text was read without a mistake. Empty without two
    evaluations.

    Raises:
        StorageError: An evaluation cannot be read, or the two have other terms.
    """
    steps = evaluation_steps(folder)
    if len(steps) < 2:
        return []
    ends = (read_evaluation(folder, step, _COLUMNS) for step in (steps[0], steps[-1]))
    before, after = map(_stored_means, ends)
    odd = sorted({*before.columns} ^ {*after.columns})
    if odd:
        raise StorageError(
            f"{folder.evaluation_path(steps[0])} and {folder.evaluation_path(steps[-1])} do not "
            f"have scores of the same terms ({', '.join(odd)} in one of them); restore the run's "
            "own from a copy"
        )
    return _compare(before, after)


def compare_evaluations(before: Evaluation, after: Evaluation) -> list[SummaryRow]:
    """As `summarise`, of two evaluations of the same prompts with the same seeds."""
    return _compare(_means(before), _means(after))


def _compare(before: pandas.DataFrame, after: pandas.DataFrame) -> list[SummaryRow]:
    rows = []
    for name in after.columns:
        pairs = pandas.concat([before[name], after[name]], axis=1).dropna().to_numpy(numpy.float32)
        if len(pairs) > 0:
            rows.append(_row(name, torch.from_numpy(pairs[:, 0]), torch.from_numpy(pairs[:, 1])))
    return rows


def _means(evaluation: Evaluation) -> pandas.DataFrame:
    table = evaluation.rewards
    raw = table.raw.masked_fill(~table.is_applicable.unsqueeze(1), torch.nan)
    columns = {name: raw[:, :, index].flatten() for index, name in enumerate(table.names)}
    columns["total"] = evaluation.totals.flatten()
    prompt_ids = [prompt.prompt_id for prompt in evaluation.prompts for _ in evaluation.totals[0]]
    return _prompt_means(pandas.DataFrame(columns), pandas.Series(prompt_ids))


def _stored_means(table: pyarrow.Table) -> pandas.DataFrame:
    frame = table.to_pandas()
    names = [name for name in frame.columns if name.startswith(RAW)]
    scores = frame[[*names, "total"]].rename(columns=lambda name: name.removeprefix(RAW))
    return _prompt_means(scores, frame["prompt_id"])


def _prompt_means(scores: pandas.DataFrame, prompt_ids: pandas.Series) -> pandas.DataFrame:
    """Mean over the samples of each prompt; a row a prompt, a column a term, the total last."""
    if "ocr" in scores:
        exact = (scores["ocr"] == 1).astype(float).where(scores["ocr"].notna())
        scores.insert(scores.columns.get_loc("ocr") + 1, "ocr_exact", exact)
    return scores.groupby(prompt_ids, sort=False).mean()


def _row(name: str, before: Float32[Tensor, " N"], after: Float32[Tensor, " N"]) -> SummaryRow:
    interval = paired_bootstrap(before, after, seed=_BOOTSTRAP_SEED)
    return SummaryRow(
        name=name,
        before=before.mean().item(),
        after=after.mean().item(),
        difference=interval.mean_difference,
        low=interval.low,
        high=interval.high,
    )
