"""Tables and page of the probe: the figures of the report, and that what it shows is escaped."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from glm_grpo.studio.probe.figures import ProbeReport
from glm_grpo.studio.probe.page import probe_tables, write_probe
from glm_grpo.studio.probe.probe import ProbeSamples
from glm_grpo.types import ImageBatch
from rewards.types import Prompt, RewardTable
from tests.studio.probe.reports import (
    NAN,
    UNDEFINED,
    make_decode,
    make_gradient,
    make_report,
    make_term,
    with_other,
)

HOSTILE = '"><script>alert(1)</script>\' onerror="x" {{ 7 * 7 }} & [red] $x_1$ שלום 🙂'


def make_samples(
    *prompts: str, totals: tuple[float, ...] = (0.25, 0.75, 0.5), without_target: str = ""
) -> ProbeSamples:
    """Sample i is of grey 10 i; targets are white, their own tokens nearly so."""
    target = torch.full((3, 32, 64), 255, dtype=torch.uint8)
    targets = [None if prompt == without_target else target for prompt in prompts]
    samples = torch.arange(0, 10 * len(totals), 10).to(torch.uint8)
    pixels = samples.view(1, -1, 1, 1, 1).repeat(len(prompts), 1, 3, 32, 64)
    scores = torch.zeros(len(prompts), 1)
    return ProbeSamples(
        prompts=tuple(
            Prompt(prompt, prompt, target=target)
            for prompt, target in zip(prompts, targets, strict=True)
        ),
        images=ImageBatch(pixels, (0,) * len(prompts)),
        scores=RewardTable(
            names=("lpips",),
            raw=torch.zeros(len(prompts), len(totals), 1),
            is_applicable=torch.ones(len(prompts), 1, dtype=torch.bool),
            weights=torch.ones(1),
            std_floors=torch.ones(1),
        ),
        totals=torch.tensor(totals).expand(len(prompts), -1),
        redrawn=torch.zeros(len(prompts), 2, 1),
        target=scores,
        reconstruction=scores,
        reconstructed_pixels=torch.stack([each - 5 for each in targets if each is not None]),
        copies=scores,
        full=None,
    )


def rows_of(report: ProbeReport, first: str) -> list[list[str]]:
    """The rows of all tables that begin with a word."""
    rows = [[*map(str, row)] for table in probe_tables(report) for row in table.rows]
    return [row for row in rows if row[0] == first]


PSNR: dict[str, Any] = {
    **{"name": "psnr", "weight": 0.1, "advantage_share": 0.875, "mean": 23.46, "std": 4.0},
    **{"std_within": 2.0, "zero_std_fraction": 0.25, "headroom": 2.5, "reconstruction": 30.0},
    **{"room": 6.54, "saturation": 0.25, "noise_fraction": 1.25, "equal_weight": 0.00325},
}


def test_tables_show_every_figure_of_a_term() -> None:
    lpips = {"weight": 0.4, "advantage_share": 0.125, "mean": 0.3125, "std": 0.0625}
    report = make_report(make_term(**lpips, std_within=0.03125), make_term(**PSNR))
    # Shares and fractions with three decimals, scores with three digits that count.
    assert rows_of(report, "lpips")[1:4] == [
        ["lpips", "7.50", "0.000", "0.000", "0.000"],
        ["lpips", "0.4", "0.125", "0.500", "0.312", "0.0625", "0.0312"],
        ["lpips", "0.250", "1.00", "1.00", "0.500", "0.000", "0.125"],
    ]
    assert rows_of(report, "psnr")[1:4] == [
        ["psnr", "7.50", "0.250", "0.000", "0.000"],
        ["psnr", "0.1", "0.875", "0.00325", "23.5", "4.00", "2.00"],
        ["psnr", "2.50", "1.00", "30.0", "6.54", "0.250", "1.250"],
    ]
    assert rows_of(report, "total") == [
        ["total", "slowly: weak gradient", "it is weak", "train for longer"],
        ["total", "7.50", "0.000", "0.000", "0.000"],
        ["total", *"---", "0.625", "0.375", "0.125"],
        ["total", "0.188", *"---", "0.250", "0.500"],
    ]


def test_first_table_tells_the_ground_and_the_remedy_of_each_verdict() -> None:
    table = probe_tables(with_other())[0]
    assert table.rows == (
        ("lpips", "can move it", "it is healthy", "-"),
        ("ocr", "can move it", "it is healthy", "-"),
        ("total", "slowly: weak gradient", "it is weak", "train for longer"),
    )
    assert "--gradient" in table.note
    # What has been measured is not recommended.
    measured = replace(with_other(), gradient=make_gradient())
    assert "--gradient" not in probe_tables(measured)[0].note


def test_a_single_term_is_not_judged_twice_unless_its_gradient_is_measured() -> None:
    report = make_report(make_term())
    assert len(probe_tables(report)[0].rows) == 1
    assert len(probe_tables(replace(report, gradient=make_gradient()))[0].rows) == 2


def test_the_total_is_judged_where_the_single_term_is_not_because_its_weight_is_negative() -> None:
    rows = probe_tables(make_report(make_term(weight=-1.0, verdict=None)))[0].rows
    assert [row[:2] for row in rows] == [("lpips", "-"), ("total", "slowly: weak gradient")]


def test_tables_show_what_copies_of_the_source_would_score_where_there_are_sources() -> None:
    report = replace(with_other(copied_source=0.75), copy_total=0.875)
    lasts = [rows_of(report, name)[3][-1] for name in ("lpips", "ocr", "total")]
    assert lasts == ["0.750", "-", "0.875"]
    assert probe_tables(report)[3].columns[-1] == "copied\nsource"
    assert "copied\nsource" not in probe_tables(with_other())[3].columns


def test_tables_show_a_dash_for_what_has_no_value() -> None:
    report = make_report(
        make_term(**UNDEFINED, advantage_share=0.0),
        make_term(name="ocr", advantage_share=1.0),
        correlations=torch.tensor([[NAN, NAN], [NAN, 1.0]], dtype=torch.float64),
    )
    assert rows_of(report, "lpips")[:5] == [
        ["lpips", *"---"],
        ["lpips", *"----"],
        ["lpips", "0.5", "0.000", *"----"],
        ["lpips", *"------"],
        ["lpips", "-", "-"],
    ]


def test_tables_show_how_cheap_rollouts_rank_and_what_they_save() -> None:
    report = make_report(make_term(), make_term(name="ocr"), decode=make_decode())
    assert rows_of(report, "1") == [["1", "36.0", "0.969", "-", "0.900"]]
    assert rows_of(report, "4") == [["4", "24.0", "-", "-", "-"]]
    assert rows_of(with_other(), "1") == []


def test_tables_show_the_signal_to_noise_ratio_of_each_kind_of_credit() -> None:
    report = replace(with_other(), gradient=make_gradient())
    assert rows_of(report, "by image") == [["by image", "0.0876", "1.00", "-", "1.00", "1.00"]]
    assert rows_of(report, "by place, reward_to_go 0.25") == [
        ["by place, reward_to_go 0.25", "0.254", "2.90", "1.90 to 3.90", "0.91", "1.46"]
    ]
    name = "by place, reward_to_go 1"
    assert rows_of(report, name) == [[name, "-0.0100", *"----"]]
    title = "gradient by image or by place: 8 batches of 32 images"
    assert title in [table.title for table in probe_tables(report)]


def test_tables_show_the_gradient_alone_where_no_score_has_places() -> None:
    report = replace(with_other(), gradient=replace(make_gradient(), by_place={}))
    assert rows_of(report, "by image") == [["by image", "0.0876"]]
    assert "gradient: 8 batches of 32 images" in [table.title for table in probe_tables(report)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with something of everything."""
    report = make_report(
        make_term(),
        make_term(name=HOSTILE),
        correlations=torch.tensor([[1.0, -0.5], [-0.5, 1.0]], dtype=torch.float64),
    )
    others = ("third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")
    samples = make_samples("no target", HOSTILE, *others, without_target="no target")
    return write_probe(report, samples, tmp_path_factory.mktemp("probe") / "a #1 50%")


@pytest.fixture(scope="module")
def page(path: Path, read_page: Callable[[Path], Any]) -> Any:
    return read_page(path)


def test_page_shows_the_tables(page: Any) -> None:
    titles = ["What drives the advantage: 24 prompts, 8 samples each", "Correlation inside groups"]
    assert [text for text in page.texts if text in titles] == titles
    start = page.texts.index("Correlation inside groups")
    assert page.texts[start + 1 : start + 10] == [
        *("term", "lpips", HOSTILE, "lpips", "1.000", "-0.500", HOSTILE, "-0.500", "1.000"),
    ]


def test_page_shows_target_reconstruction_best_and_worst_sample(path: Path, page: Any) -> None:
    ends = ["best of 3: total 0.750", "worst of 3: total 0.250"]
    assert page.after("no target", 2) == ends
    assert page.after("third", 4) == ["target", "target's own tokens", *ends]
    # As they were decoded, to the bit; of a prompt without a target the samples alone.
    for name, grey in {"1-1": 10, "1-2": 0, "3-1": 255, "3-2": 250, "3-3": 10, "3-4": 0}.items():
        image = np.asarray(Image.open(path.parent / f"prompt-{name}.png"))
        assert image.shape == (32, 64, 3)
        assert (image == grey).all()
    assert "eighth" in page.texts
    assert "ninth" not in page.texts


def test_page_shows_two_samples_of_a_zero_std_group(tmp_path: Path) -> None:
    write_probe(with_other(), make_samples("flat", totals=(0.5, 0.5, 0.5)), tmp_path)
    best, worst = (np.asarray(Image.open(tmp_path / f"prompt-1-{n}.png")) for n in (3, 4))
    assert (best != worst).all()


def test_page_shows_what_users_wrote_as_text(path: Path, page: Any) -> None:
    assert page.all("script") == []
    names = {name for _, attributes in page.elements for name in attributes}
    assert not [name for name in names if name.startswith("on")]
    # A row of each of five tables, a column of the last, and a prompt.
    assert page.texts.count(HOSTILE) == 7
    assert page.alternatives()["prompt-2-4.png"] == f"worst of 3: total 0.250: {HOSTILE}"
    assert not re.search(r"https?:|//\w|@import|url\(|<script|<iframe", path.read_text())
    assert page.linked() == {file.name for file in path.parent.glob("*.png")}
