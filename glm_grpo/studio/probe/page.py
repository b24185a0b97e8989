"""Show a probe: tables for the terminal, and a page with samples."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path

from jaxtyping import UInt8
from torch import Tensor

from glm_grpo.grpo.signal_to_noise import Signal
from glm_grpo.output import counted
from glm_grpo.run.figures import NO_VALUE, Table
from glm_grpo.run.folder import write_atomically
from glm_grpo.studio.gallery.report import SMALL_WIDTH, PromptTiles, Report, Tile, write_report
from glm_grpo.studio.probe.figures import ProbedDecode, ProbedTerm, ProbeReport
from glm_grpo.studio.probe.gradient import ProbedGradient
from glm_grpo.studio.probe.probe import ProbeSamples
from rewards.images import to_pil

_SHOWN_PROMPTS = 8
_ROUNDING = 1e-12
"""A smaller figure is a rounding error of a mean."""


def probe_tables(report: ProbeReport) -> list[Table]:
    """Tables of each term, and of pairs of terms if there are several."""
    names = report.names()
    tables = [
        _verdict_table(report),
        _groups_table(report),
        _drive_table(report),
        _gain_table(report),
    ]
    if len(names) > 1:
        correlations = zip(names, report.audit.correlations.tolist(), strict=True)
        tables.append(
            Table(
                "correlation inside groups",
                ("term", *names),
                tuple((name, *map(_show_share, line)) for name, line in correlations),
                "near 1: two terms measure the same thing; below 0: they pull against each other",
            )
        )
    if report.decode is not None:
        tables.append(_decode_table(report.decode, names))
    if report.gradient is not None:
        tables.append(_gradient_table(report.gradient, report.group_size))
    return tables


def _verdict_table(report: ProbeReport) -> Table:
    verdicts = [(term.audit.name, term.verdict) for term in report.terms]
    if len(verdicts) > 1 or report.gradient is not None or verdicts[0][1] is None:
        # Otherwise the total is the one term, judged by the same scores.
        verdicts.append(("total", report.verdict))
    return Table(
        "can it move the model?",
        ("term", "verdict", "because", "what to change"),
        tuple(
            (name, *(NO_VALUE,) * 3)
            if verdict is None
            else (name, verdict.short(), verdict.ground, verdict.remedy or NO_VALUE)
            for name, verdict in verdicts
        ),
        "" if report.gradient is not None else "--gradient measures whether batches agree",
        is_text=True,
    )


def _groups_table(report: ProbeReport) -> Table:
    audits = [*(term.audit for term in report.terms), report.total]
    return Table(
        "what differs inside groups",
        ("term", "distinct\nscores", "zero-std\ngroups", "all\nworst", "all\nbest"),
        tuple(
            (
                *(audit.name, _show(audit.distinct)),
                *map(_show_share, (audit.zero_std_fraction, audit.all_worst, audit.all_best)),
            )
            for audit in audits
        ),
        "distinct scores: in a group, on average; zero-std groups: fraction whose images all score "
        "the same; all worst, all best: fraction whose images all have the lowest or the highest "
        "score",
    )


def _drive_table(report: ProbeReport) -> Table:
    return Table(
        f"what drives the advantage: {counted(report.prompts, 'prompt')}, {report.group_size} "
        "samples each",
        (
            *("term", "weight", "share", "equal\nweight"),
            *("mean", "std", "std\ninside\ngroups"),
        ),
        (
            *map(_drive_row, report.terms),
            (
                *("total", *(NO_VALUE,) * 3),
                *map(_show, (report.mean_total, report.total.std)),
                _show(report.total.std_within),
            ),
        ),
        "share: of the variance of the advantage; equal weight: 1 / std inside groups, scaled to "
        "the sum of the weights, so that all terms have the same influence",
    )


def _drive_row(term: ProbedTerm) -> tuple[str, ...]:
    audit = term.audit
    return (
        *(audit.name, f"{term.weight:g}", _show_share(audit.advantage_share)),
        *map(_show, (term.equal_weight, audit.mean, audit.std, audit.std_within)),
    )


def _gain_table(report: ProbeReport) -> Table:
    total = report.total
    copied = [term.copied_source for term in report.terms] + [report.copy_total]
    rows = [
        *map(_gain_row, report.terms),
        (
            *("total", _show(total.headroom), *(NO_VALUE,) * 3),
            *map(_show_share, (total.saturation, report.total_noise_fraction)),
        ),
    ]
    columns = [
        *("term", "headroom", "targets", "own\ntokens", "room"),
        *("tied\nat best", "noise's\npart"),
    ]
    # Only edits have sources.
    if not all(map(math.isnan, copied)):
        columns.append("copied\nsource")
        rows = [(*row, _show(score)) for row, score in zip(rows, copied, strict=True)]
    return Table(
        "what is left to gain, and what is chance",
        tuple(columns),
        tuple(rows),
        f"headroom: best of {report.group_size} minus mean; own tokens: score of the targets' "
        "decoded tokens; room: that minus mean; noise's part: variance of the same tokens, "
        "decoded and scored again, relative to that inside groups",
    )


def _gain_row(term: ProbedTerm) -> tuple[str, ...]:
    audit = term.audit
    scores = (audit.headroom, term.target, term.reconstruction, term.room)
    return (
        *(audit.name, *map(_show, scores)),
        *map(_show_share, (audit.saturation, term.noise_fraction)),
    )


def _decode_table(decode: ProbedDecode, names: tuple[str, ...]) -> Table:
    correlations = (*decode.rank_correlations, decode.total_rank_correlation)
    return Table(
        "cheaper decode of rollouts",
        ("steps", "images/s", *names, "total"),
        (
            (
                *(str(decode.steps), _show(decode.images_per_second)),
                *map(_show_share, correlations),
            ),
            (
                *(str(decode.full_steps), _show(decode.full_images_per_second)),
                *(NO_VALUE for _ in correlations),
            ),
        ),
        "images/s: drawn, not scored; terms and total: rank correlation (Spearman's) inside groups "
        "with the same tokens decoded in full",
    )


def _gradient_table(gradient: ProbedGradient, group_size: int) -> Table:
    by_place = [
        _credit_row(f"by place, reward_to_go {weight:g}", signal)
        for weight, signal in gradient.by_place.items()
    ]
    size = f"{gradient.batches} batches of {gradient.prompts * group_size} images"
    signal = "SNR: size of the mean gradient, squared, relative to its variance from batch to batch"
    if not by_place:
        return Table(
            f"gradient: {size}",
            ("credit", "SNR"),
            (("by image", _show(gradient.by_image.ratio)),),
            f"{signal}; no term with a weight says which places earned its score, so credit by "
            "place would be the same",
        )
    return Table(
        f"gradient by image or by place: {size}",
        ("credit", "SNR", "SNR,\nrelative", "95 %\ninterval", "cosine", "gain"),
        (_credit_row("by image", gradient.by_image), *by_place),
        f"{signal}; cosine: with the mean gradient by image; gain: in the total by a step of equal "
        "length, relative to by image; a dash: the batches are too few or too noisy. "
        f"Verdict: {gradient.verdict()}",
    )


def _credit_row(name: str, signal: Signal) -> tuple[str, ...]:
    relative, cosine, gain = (
        NO_VALUE if math.isnan(value) else f"{value:z.2f}"
        for value in (signal.relative, signal.cosine, signal.gain)
    )
    # The row by image is compared with itself, so its interval has no width.
    has_interval = signal.low < signal.high
    interval = f"{signal.low:z.2f} to {signal.high:z.2f}" if has_interval else NO_VALUE
    return (name, _show(signal.ratio), relative, interval, cosine, gain)


def _show(value: float) -> str:
    """Three significant digits, because terms are of any size; a dash for NaN."""
    exact = 0.0 if abs(value) < _ROUNDING else value
    return NO_VALUE if math.isnan(value) else f"{exact:#.3g}".removesuffix(".")


def _show_share(value: float) -> str:
    """Three decimals; a dash for NaN."""
    return NO_VALUE if math.isnan(value) else f"{value:z.3f}"


def write_probe(report: ProbeReport, samples: ProbeSamples, directory: Path) -> Path:
    """Write `index.html` with the samples of the first eight prompts; returns its path.

    Files with the same names are replaced.
    """
    reconstructed = iter(samples.reconstructed_pixels)
    shown = [
        PromptTiles(
            samples.prompts[row].prompt,
            tuple(_write_tiles(_list_images(samples, row, reconstructed), row + 1, directory)),
        )
        for row in range(min(_SHOWN_PROMPTS, len(samples.prompts)))
    ]
    prompts = counted(report.prompts, "prompt")
    page = Report(
        title=f"Probe of {', '.join(report.names())}",
        tables=probe_tables(report),
        prompts=shown,
        about_prompts=f"{len(shown)} of {prompts}. Best and worst are by total.",
    )
    return write_report(page, directory)


def _list_images(
    samples: ProbeSamples, row: int, reconstructed: Iterator[UInt8[Tensor, "3 H W"]]
) -> Iterator[tuple[str, UInt8[Tensor, "3 H W"]]]:
    """Label the sources, target, its own tokens, best and worst sample of a prompt, if any.

    `reconstructed` yields the decoded tokens of the targets of this and later prompts.
    """
    prompt, pixels = samples.prompts[row], samples.images.pixels[row]
    for source in prompt.sources:
        yield "source", source
    if prompt.target is not None:
        yield "target", prompt.target
        yield "target's own tokens", next(reconstructed)
    totals = samples.totals[row].tolist()
    scored = [sample for sample, total in enumerate(totals) if not math.isnan(total)]
    if not scored:
        return
    order = sorted(scored, key=totals.__getitem__)
    for name, sample in (("best", order[-1]), ("worst", order[0])):
        yield f"{name} of {len(totals)}: total {_show(totals[sample])}", pixels[sample]


def _write_tiles(
    images: Iterator[tuple[str, UInt8[Tensor, "3 H W"]]], number: int, directory: Path
) -> Iterator[Tile]:
    for index, (label, pixels) in enumerate(images, start=1):
        content = io.BytesIO()
        to_pil(pixels).save(content, format="PNG")
        file = f"prompt-{number}-{index}.png"
        write_atomically(directory / file, content.getvalue())
        yield Tile(label, file, is_small=pixels.shape[-1] < SMALL_WIDTH)
