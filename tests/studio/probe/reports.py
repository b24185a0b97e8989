"""Reports of a probe, made by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glm_grpo.grpo.signal_to_noise import Signal
from glm_grpo.studio.probe.credit import ProbedCredit
from glm_grpo.studio.probe.figures import ProbedDecode, ProbedTerm, ProbeReport
from rewards.audit import RewardAudit, TermAudit

NAN = float("nan")
AUDITED = (
    *("name", "mean", "std", "std_within", "zero_std_fraction"),
    *("advantage_share", "headroom", "saturation"),
)
HEALTHY: dict[str, Any] = {
    **{"name": "lpips", "mean": 0.5, "std": 0.25, "std_within": 0.125, "zero_std_fraction": 0.0},
    **{"advantage_share": 0.5, "headroom": 0.25, "saturation": 0.0},
    **{"weight": 0.5, "target": 1.0, "reconstruction": 1.0, "room": 0.5, "decoder_fraction": 0.125},
    **{"equal_weight": 0.5, "copied_source": NAN},
}
"""A term of prompts with targets and without sources."""
UNDEFINED = dict.fromkeys(
    (
        *("mean", "std", "std_within", "zero_std_fraction", "headroom", "saturation"),
        *("target", "reconstruction", "room", "decoder_fraction", "equal_weight"),
    ),
    NAN,
)
"""What the audit gives for a term that applies to no prompt."""


def make_term(**overrides: Any) -> ProbedTerm:
    figures = HEALTHY | overrides
    return ProbedTerm(
        audit=TermAudit(**{key: figures[key] for key in AUDITED}),
        **{key: value for key, value in figures.items() if key not in AUDITED},
    )


def make_report(
    *terms: ProbedTerm,
    correlations: Tensor | None = None,
    decode: ProbedDecode | None = None,
) -> ProbeReport:
    if correlations is None:
        correlations = torch.eye(len(terms), dtype=torch.float64)
    audit = RewardAudit(tuple(term.audit for term in terms), correlations, headroom=0.1875)
    return ProbeReport(
        terms,
        audit,
        prompts=24,
        group_size=8,
        mean_total=0.625,
        copy_total=NAN,
        decode=decode,
        credit=None,
    )


def with_other(**overrides: Any) -> ProbeReport:
    """A report of a term and of another one of the same weight."""
    return make_report(make_term(**overrides), make_term(name="ocr"))


def make_decode() -> ProbedDecode:
    return ProbedDecode(
        steps=1,
        full_steps=4,
        rank_correlations=(0.96875, NAN),
        total_rank_correlation=0.9,
        images_per_second=36.0,
        full_images_per_second=24.0,
    )


def make_credit() -> ProbedCredit:
    """Eight batches of four prompts."""
    return ProbedCredit(
        by_image=Signal(0.0876, 1.0, 1.0, 1.0, 1.0, 1.0),
        by_place={
            0.25: Signal(0.254, 2.9, 1.9, 3.9, 0.914, 1.456),
            1.0: Signal(-0.01, NAN, NAN, NAN, NAN, NAN),
        },
        batches=8,
        prompts=4,
    )
