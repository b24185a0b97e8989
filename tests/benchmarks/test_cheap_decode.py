from __future__ import annotations

import json

import pytest

from benchmarks import cheap_decode


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Report and picture of the smallest size."""
    folder = tmp_path_factory.mktemp("cheap")
    report, picture = folder / "report.json", folder / "picture.png"
    cheap_decode.main(
        [
            *("--prompts", "1", "--group", "3", "--repeats", "2"),
            *("--json", str(report), "--picture", str(picture)),
        ]
    )
    return json.loads(report.read_text()), picture


@pytest.mark.long
def test_report_has_a_row_for_every_number_of_steps(written):
    report, _ = written
    rows = report["rows"]
    assert [row["steps"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert 0 < row["slowest"] <= row["images_per_second"] <= row["fastest"]
        assert [*row["rank_correlations"]] == ["lpips", "ssim", "ocr", "aesthetic", "total"]
    assert report["ratio"] == pytest.approx(
        rows[0]["images_per_second"] / rows[-1]["images_per_second"]
    )
