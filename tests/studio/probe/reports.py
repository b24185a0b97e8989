"""Reports of a probe, made by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glm_grpo.grpo.signal_to_noise import Agreement, Signal
from glm_grpo.studio.probe.figures import ProbedDecode, ProbedTerm, ProbeReport
from glm_grpo.studio.probe.gradient import ProbedGradient
from glm_grpo.studio.probe.verdict import Verdict
from rewards.audit import RewardAudit, TermAudit

NAN = float("nan")
AUDITED = (
    *("name", "mean", "std", "std_within", "zero_std_fraction"),
    *("advantage_share", "headroom", "saturation", "distinct", "all_worst", "all_best"),
)
HEALTHY: dict[str, Any] = {
    **{"name": "lpips", "mean": 0.5, "std": 0.25, "std_within": 0.125, "zero_std_fraction": 0.0},
    **{"advantage_share": 0.5, "headroom": 0.25, "saturation": 0.0},
    **{"distinct": 7.5, "all_worst": 0.0, "all_best": 0.0},
    **{"weight": 0.5, "target": 1.0, "reconstruction": 1.0, "room": 0.5, "noise_fraction": 0.125},
    **{
        "equal_weight": 0.5,
        "copied_source": NAN,
        "verdict": Verdict("can move it", "", "it is healthy"),
    },
}
"""A term of prompts with targets and without sources."""
UNDEFINED = dict.fromkeys(
    (
        *("mean", "std", "std_within", "zero_std_fraction", "headroom", "saturation"),
        *("distinct", "all_worst", "all_best"),
        *("target", "reconstruction", "room", "noise_fraction", "equal_weight"),
    ),
    NAN,
) | {"verdict": None}
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
    total = make_term(name="total", std=0.375, headroom=0.1875, saturation=0.25).audit
    audit = RewardAudit(tuple(term.audit for term in terms), correlations)
    return ProbeReport(
        terms,
        audit,
        total,
        prompts=24,
        group_size=8,
        mean_total=0.625,
        copy_total=NAN,
        total_noise_fraction=0.5,
        verdict=Verdict("slowly", "weak gradient", "it is weak", "train for longer"),
        decode=decode,
        gradient=None,
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


def make_gradient() -> ProbedGradient:
    """Eight batches of four prompts."""
    return ProbedGradient(
        agreement=Agreement(0.0876, 0.02, 0.15, 0.001),
        by_image=Signal(0.0876, 1.0, 1.0, 1.0, 1.0, 1.0),
        by_place={
            0.25: Signal(0.254, 2.9, 1.9, 3.9, 0.914, 1.456),
            1.0: Signal(-0.01, NAN, NAN, NAN, NAN, NAN),
        },
        batches=8,
        prompts=4,
    )
