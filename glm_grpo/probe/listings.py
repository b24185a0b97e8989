"""The figures of a probe as tables of text, the same for terminal and page."""

from __future__ import annotations

import math
from dataclasses import dataclass

from glm_grpo.probe.findings import (
    NO_VALUE,
    ProbedDecode,
    ProbedTerm,
    ProbeReport,
    render,
)
from rewards.audit.audit import Conflict

_NO_VALUES = (NO_VALUE,) * 4
"""Of what has no value for the total."""


@dataclass(frozen=True)
class Listing:
    """A table of text.

    Attributes:
        title: In lower case.
        columns: Their heads.
        rows: As many cells each as there are columns.
        note: What the columns mean; may be empty.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str


def list_figures(report: ProbeReport) -> list[Listing]:
    """The figures of a probe: of each term, and between them where there is more than one."""
    groups = f"{report.prompts} prompts, {report.group_size} samples each"
    listings = [
        Listing(
            f"what drives the advantage: {groups}",
            (
                *("term", "weight", "share"),
                *(("proposed\nweight",) if report.terms[0].proposed_weight is not None else ()),
                *("mean", "std", "std\ninside\ngroups", "flat\ngroups"),
            ),
            tuple(map(_drive_row, report.terms)),
            "share: of the variance of the advantage; std inside groups: the part of the std that "
            "training sees; flat groups: fraction whose images all score the same"
            + _advice(report),
        ),
        Listing(
            "what is left to gain, and what is chance",
            ("term", "headroom", "own tokens", "room", "tied at best", "decoder's part"),
            (*map(_gain_row, report.terms), ("total", render(report.audit.headroom), *_NO_VALUES)),
            f"headroom: best of {report.group_size} less mean; own tokens: score of the decoded "
            "tokens of the targets; room: that less mean; decoder's part: variance under other "
            "noises, relative to that inside groups",
        ),
    ]
    names = report.names()
    if len(names) > 1:
        rows = zip(names, report.audit.correlations.tolist(), strict=True)
        cells = tuple((name, *map(render_share, line)) for name, line in rows)
        listings.append(Listing("correlation inside groups", ("", *names), cells, ""))
    if report.decode is not None:
        listings.append(_decode_listing(report.decode, names))
    return listings


def describe_conflict(conflict: Conflict) -> str:
    """Which terms pull against each other, and how much."""
    return f"{conflict.first} and {conflict.second}: correlation {conflict.correlation:.3f}"


def render_share(value: float) -> str:
    """Three decimals, as shares and correlations are of order 1; a dash for NaN."""
    # 0 is added as a rounded negative number would show as -0.000.
    return NO_VALUE if math.isnan(value) else f"{round(value, 3) + 0.0:.3f}"


def _decode_listing(decode: ProbedDecode, names: tuple[str, ...]) -> Listing:
    correlations = (*decode.rank_correlations, decode.total_rank_correlation)
    cheap, full = decode.images_per_second, decode.full_images_per_second
    return Listing(
        "cheaper decode of rollouts",
        ("steps", "images/s", *names, "total"),
        (
            (str(decode.steps), render(cheap), *map(render_share, correlations)),
            (str(decode.full_steps), render(full), *(NO_VALUE for _ in correlations)),
        ),
        f"images/s: drawn, not scored; fewer steps are {cheap / full:.2f} x as fast; terms and "
        "total: rank correlation (Spearman's) inside groups with the scores of the same tokens "
        "decoded in full",
    )


def _drive_row(term: ProbedTerm) -> tuple[str, ...]:
    audit, proposed = term.audit, term.proposed_weight
    return (
        *(audit.name, f"{term.weight:g}", render_share(audit.advantage_share)),
        *(() if proposed is None else (f"{proposed:.4g}",)),
        *(render(audit.mean), render(audit.std), render(audit.std_within)),
        render_share(audit.flat_fraction),
    )


def _gain_row(term: ProbedTerm) -> tuple[str, ...]:
    return (
        *(
            term.audit.name,
            render(term.audit.headroom),
            render(term.reconstruction),
            render(term.room),
        ),
        *(render_share(term.audit.saturation), render_share(term.decoder_fraction)),
    )


def _advice(report: ProbeReport) -> str:
    proposals = [
        f"reward.terms.{term.audit.name}.weight={term.proposed_weight:.4g}"
        for term in report.terms
        if term.proposed_weight is not None
    ]
    return f"; to use the proposed weights: {' '.join(proposals)}" if proposals else ""
