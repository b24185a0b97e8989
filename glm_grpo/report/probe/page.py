"""The report of a probe: its tables for the terminal, and its page with charts and samples."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Float32, UInt8
from PIL import Image
from torch import Tensor

from glm_grpo.gallery.report import (
    NO_VALUE,
    SMALL_WIDTH,
    Cell,
    Pictures,
    Report,
    Table,
    Tile,
    write_report,
)
from glm_grpo.grpo.signal_to_noise import Signal
from glm_grpo.report.probe.credit import ProbedCredit
from glm_grpo.report.probe.findings import (
    NOISY_DECODER,
    ProbedDecode,
    ProbedTerm,
    ProbeReport,
    list_findings,
    render,
)
from glm_grpo.run.folder import write_atomically
from rewards.types import Prompt

_NO_VALUES = (NO_VALUE,) * 5
"""Cells of figures that the total does not have."""
_SHOWN_PROMPTS = 8
_NAMED_LATERS = {0.0: " (own place)", 1.0: " (reward-to-go)"}


@dataclass(frozen=True)
class ProbedPrompt:
    """The samples of one prompt, and what the decoder makes of its target's own tokens.

    Attributes:
        prompt: With its target, if it has one.
        pixels: RGB, 0..255.
        totals: Total of each of the G samples.
        reconstructed_pixels: None without a target.
        reconstruction_total: NaN without a target, and where totals are relative to a group.
    """

    prompt: Prompt
    pixels: UInt8[Tensor, "G 3 H W"]
    totals: Float32[Tensor, " G"]
    reconstructed_pixels: UInt8[Tensor, "3 H W"] | None
    reconstruction_total: float


def list_figures(report: ProbeReport) -> list[Table]:
    """The figures of a probe: of each term, and between them where there is more than one."""
    groups = f"{report.prompts} prompts, {report.group_size} samples each"
    tables = [
        Table(
            f"what drives the advantage: {groups}",
            (
                *("term", "weight", "share", "equal\nweight"),
                *("mean", "std", "std\ninside\ngroups", "flat\ngroups"),
            ),
            tuple(
                _drive_row(term, share)
                for term, share in zip(report.terms, report.weight_shares(), strict=True)
            ),
            "share: of the variance of the advantage; equal weight: 1 / std inside groups, scaled "
            "to the sum of the weights, at which all terms have the same say; std inside groups: "
            "the part of the std that training sees; flat groups: fraction whose images all score "
            "the same",
        ),
        Table(
            "what is left to gain, and what is chance",
            (
                *("term", "headroom", "targets", "own\ntokens", "room"),
                *("tied\nat best", "decoder's\npart"),
            ),
            (*map(_gain_row, report.terms), ("total", render(report.audit.headroom), *_NO_VALUES)),
            f"headroom: best of {report.group_size} minus mean; targets: score of the target "
            "images; own tokens: score of their decoded tokens; room: that minus mean; decoder's "
            "part: variance under other noises, relative to that inside groups, above "
            f"{NOISY_DECODER:g} a term prefers images largely by chance",
        ),
    ]
    names = report.names()
    if len(names) > 1:
        correlations = zip(names, report.audit.correlations.tolist(), strict=True)
        tables.append(
            Table(
                "correlation inside groups",
                ("term", *names),
                tuple((name, *map(_share_cell, line)) for name, line in correlations),
                "near 1: two terms measure the same thing; below 0: they pull against each other",
            )
        )
    if report.decode is not None:
        tables.append(_decode_table(report.decode, names))
    if report.credit is not None:
        tables.append(_credit_table(report.credit, report.group_size))
    return tables


def list_advice(report: ProbeReport) -> list[Table]:
    """Terms that pull against each other, if any do, and what stands out."""
    conflicts = tuple(
        (f"{each.first} and {each.second}", f"{each.correlation:.3f}") for each in report.conflicts
    )
    findings = tuple(
        (finding.term or NO_VALUE, finding.what, finding.remedy)
        for finding in list_findings(report)
    )
    tables = [
        Table(
            "conflicts",
            ("terms", "correlation inside groups"),
            conflicts,
            "images with a high score by one term have a low score by the other; training follows "
            "the term with the larger share of the advantage, at the cost of the other",
        ),
        Table(
            "findings",
            ("term", "what was found", "what to do"),
            findings or ((NO_VALUE, "nothing stands out", NO_VALUE),),
            is_text=True,
        ),
    ]
    return tables if conflicts and not report.has_few_prompts else tables[1:]


def render_share(value: float) -> str:
    """Three decimals, as shares and correlations are of order 1; a dash for NaN."""
    return NO_VALUE if math.isnan(value) else f"{value:z.3f}"


def _decode_table(decode: ProbedDecode, names: tuple[str, ...]) -> Table:
    correlations = (*decode.rank_correlations, decode.total_rank_correlation)
    cheap, full = decode.images_per_second, decode.full_images_per_second
    return Table(
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


def _credit_table(credit: ProbedCredit, group_size: int) -> Table:
    by_place = [
        _credit_row(f"by place, later {later:g}{_NAMED_LATERS.get(later, '')}", signal)
        for later, signal in credit.by_place.items()
    ]
    return Table(
        f"gradient by image or by place: {credit.batches} batches of "
        f"{credit.prompts * group_size} images",
        ("credit", "SNR", "SNR,\nrelative", "95 %\ninterval", "cosine", "gain"),
        (_credit_row("by image", credit.by_image), *by_place),
        "SNR: size of the mean gradient, squared, relative to its variance from batch to batch; "
        "twice the SNR is the gradient quality of twice the images; cosine: between the mean "
        "gradients by place and by image, an estimate, so it may exceed 1; gain: in the total by a "
        "step of equal length, relative to by image, to first order: it counts both the noise and "
        "another direction",
    )


def _credit_row(name: str, signal: Signal) -> tuple[str | Cell, ...]:
    low, high = signal.low, signal.high
    # By image, which is compared with itself, it has no width.
    has_interval = low < high
    relative, cosine, gain = (
        NO_VALUE if math.isnan(value) else f"{value:.2f}"
        for value in (signal.relative, signal.cosine, signal.gain)
    )
    return (
        *(name, render(signal.ratio)),
        Cell(relative, "better" if low > 1 else "worse" if high < 1 else ""),
        *(f"{low:.2f} to {high:.2f}" if has_interval else NO_VALUE, cosine, gain),
    )


def _drive_row(term: ProbedTerm, weight_share: float) -> tuple[str | Cell, ...]:
    audit = term.audit
    return (
        audit.name,
        Cell(f"{term.weight:g}", bar=weight_share),
        _share_cell(audit.advantage_share),
        *(render(term.equal_weight), render(audit.mean)),
        *(render(audit.std), render(audit.std_within)),
        render_share(audit.flat_fraction),
    )


def _gain_row(term: ProbedTerm) -> tuple[str | Cell, ...]:
    audit = term.audit
    return (
        *(audit.name, render(audit.headroom), render(term.target)),
        *(render(term.reconstruction), render(term.room)),
        *(render_share(audit.saturation), _share_cell(term.decoder_fraction)),
    )


def _share_cell(value: float) -> Cell:
    return Cell(render_share(value), bar=value)


def probe_tables(report: ProbeReport) -> list[Table]:
    """What there is to say of a probe, for the terminal: terms, correlations, findings."""
    return [*list_figures(report), *list_advice(report)]


def write_probe(report: ProbeReport, prompts: Sequence[ProbedPrompt], directory: Path) -> Path:
    """Write `index.html` and its pictures. Files of the same names are replaced, others stay.

    Args:
        report: What was found.
        prompts: Samples; those of the first eight prompts are shown.
        directory: Made where it does not exist.

    Returns:
        The path of the page.

    Raises:
        StorageError: A file cannot be written.
    """
    shown = prompts[:_SHOWN_PROMPTS]
    page = Report(
        title=f"Probe of {', '.join(report.names())}",
        summary=(
            f"What each reward term measures on the untrained model: {report.prompts} prompts, "
            f"{report.group_size} samples each. Scores: higher is better. Bars: parts of the "
            "weights and of the advantage, the decoder's part, correlations.",
        ),
        tables=[*list_advice(report), *list_figures(report)],
        pictures=[
            Pictures(prompt.prompt.prompt, (_write_tiles(prompt, number, directory),))
            for number, prompt in enumerate(shown, start=1)
        ],
        about_pictures=f"{len(shown)} of {report.prompts} prompts. Best and worst are by total.",
    )
    return write_report(page, directory)


def _write_tiles(prompt: ProbedPrompt, number: int, directory: Path) -> tuple[Tile, ...]:
    """Write sources, target, own tokens, best and worst sample, as far as there are any."""
    totals = prompt.totals.tolist()
    samples = range(len(totals))
    best = max(samples, key=totals.__getitem__)
    # The last of equals, so that a flat group shows two samples.
    worst = min(reversed(samples), key=totals.__getitem__)
    pictures = (
        *(
            (f"source-{index}", f"Source {index}", pixels, None)
            for index, pixels in enumerate(prompt.prompt.sources, start=1)
        ),
        ("target", "Target", prompt.prompt.target, None),
        ("own", "Target's own tokens", prompt.reconstructed_pixels, prompt.reconstruction_total),
        ("best", f"Best of {len(totals)}", prompt.pixels[best], totals[best]),
        ("worst", f"Worst of {len(totals)}", prompt.pixels[worst], totals[worst]),
    )
    tiles = []
    for name, label, pixels, total in pictures:
        if pixels is not None:
            content = io.BytesIO()
            Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy()).save(content, format="PNG")
            file = f"prompt-{number}-{name}.png"
            write_atomically(directory / file, content.getvalue())
            scores = () if total is None else (("total", render(total)),)
            is_small = pixels.shape[-1] < SMALL_WIDTH
            tiles.append(Tile(label, file, is_small=is_small, scores=scores))
    return tuple(tiles)
