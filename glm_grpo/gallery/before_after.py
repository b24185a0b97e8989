"""Before and after: a page on what a run was and what it changed, for people outside.

It is made from stored tables alone, so it also works for a run that crashed or still goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from glm_grpo.config import Config
from glm_grpo.errors import CheckpointError, ConfigError, StorageError
from glm_grpo.gallery import pages
from glm_grpo.gallery.changed_prompts import read_cases
from glm_grpo.gallery.problems import describe
from glm_grpo.gallery.summary import SummaryRow
from glm_grpo.run.config import read_config, read_config_text
from glm_grpo.run.folder import RunFolder, write_atomically
from glm_grpo.run.tables import evaluation_steps
from rewards.terms_config import AestheticConfig, LpipsConfig, TermConfig

_SMALL_WIDTH = 256
"""Pictures narrower than this (pixels) are enlarged on the page, with their pixels kept sharp."""

_EMBEDDED_MODEL = "tiny"
_EMBEDDED_WEIGHTS = "pkg://glm_grpo/tiny/"


@dataclass(frozen=True)
class _Settings:
    """The config as text and as values, and what hinders reading it."""

    text: str | None
    config: Config | None
    problem: str | None


def write_before_after(folder: RunFolder, summary: Sequence[SummaryRow]) -> Path:
    """Write `gallery/report.html` of a run, whole or not at all.

    The page needs no network, no server and no script. It shows the thumbnails of the gallery and
    leads to the run's pictures by relative paths. A config or a table that cannot be read, and a
    run with fewer than two evaluations, are said in place.

    Args:
        folder: The run.
        summary: Before and after, one row a term and one for the total; may be empty.

    Returns:
        The path of the page.

    Raises:
        StorageError: The page cannot be written.
    """
    steps = evaluation_steps(folder)
    settings = _read_settings(folder)
    config = settings.config
    cases, prompts, problem = read_cases(folder, steps)
    page = pages.render(
        "before_after.html.j2",
        run=" / ".join(folder.path.absolute().parts[-2:]),
        steps=steps,
        settings=settings,
        config=config,
        reward=None if config is None else _describe_reward(config),
        terms=None if config is None else _describe_terms(config),
        cautions={} if config is None else _caution_terms(config),
        is_miniature=config is not None and config.model.path == _EMBEDDED_MODEL,
        rows=[(row, _verdict(row, config)) for row in summary],
        total=next((row for row in summary if row.name == "total"), None),
        cases=cases,
        prompts=prompts,
        problem=problem,
        is_small=config is not None and config.rollout.width < _SMALL_WIDTH,
    )
    path = folder.inside("gallery/report.html")
    write_atomically(path, page)
    return path


def _read_settings(folder: RunFolder) -> _Settings:
    text = None
    try:
        text = read_config_text(folder)
        return _Settings(text, read_config(folder), None)
    except (CheckpointError, ConfigError, StorageError) as error:
        return _Settings(text, None, describe(error, folder))


def _describe_reward(config: Config) -> str:
    """The formula, such as `0.4 lpips + 0.3 ocr`; terms of no weight are left out."""
    weights = config.reward.weights()
    parts = [f"{weight:+g} {name}" for name, weight in weights.items() if weight != 0]
    return " ".join(f"{part[0]} {part[1:]}" for part in parts).removeprefix("+ ")


def _describe_terms(config: Config) -> dict[str, str]:
    """What each term measures, by its name: the first line of its documentation."""
    return {
        name: (type(term).__doc__ or "").split("\n")[0]
        for name, term in config.reward.terms.items()
    }


def _caution_terms(config: Config) -> dict[str, str]:
    """What a term's score does not say, by its name; terms that need no such word are left out."""
    cautions = {name: _caution(term) for name, term in config.reward.terms.items()}
    return {name: caution for name, caution in cautions.items() if caution}


def _caution(term: TermConfig) -> str:
    if isinstance(term, LpipsConfig) and not term.pretrained:
        return (
            "The features are untrained: these distances compare structure but do not measure "
            "human perception."
        )
    if isinstance(term, AestheticConfig) and term.head.startswith(_EMBEDDED_WEIGHTS):
        return "Here by the embedded miniature of a CLIP, made for demonstration."
    return ""


def _verdict(row: SummaryRow, config: Config | None) -> str:
    """What a change means, as far as its interval and the wish of the reward say so."""
    if row.low <= 0 <= row.high:
        return "no clear change"
    weights = {} if config is None else config.reward.weights()
    # The total, and what is counted beside the terms, is meant to rise.
    weight = 0.0 if config is None else weights.get(row.name, 1.0)
    if weight == 0:
        return "rose" if row.low > 0 else "fell"
    return "better" if (row.low > 0) == (weight > 0) else "worse"
