from __future__ import annotations

from dataclasses import replace

import numpy
import torch

from glm_grpo.run.trackers import (
    MAX_PROMPTS,
    MAX_SAMPLES,
    MAX_SIDE,
    tabulate,
    to_markdown,
)


def test_table_has_a_row_a_image_and_leaves_empty_what_does_not_apply(make_evaluation) -> None:
    cells = tabulate(make_evaluation()).rows

    # No prompt has a source, so there is no column for it.
    assert [*cells[0]] == [
        *("prompt_id", "prompt", "sample", "target", "image", "total", "clip", "ocr", "ocr note"),
    ]
    assert [cell["prompt_id"] for cell in cells] == ["sign", "sign", "field-1", "field-1"]
    assert [cell["sample"] for cell in cells] == [0, 1, 0, 1]
    # Not 0.009999999776482582, which is what float32 makes of 0.01.
    assert [cell["total"] for cell in cells] == [0.0, 0.02, 0.2, 0.22]
    assert [cell["clip"] for cell in cells] == [0.0, 0.01, 0.1, 0.11]
    assert [cell["ocr"] for cell in cells] == [0.0, 0.01, None, None]
    assert [cell["ocr note"] for cell in cells] == ["word 0", "word 1", None, None]
    assert [cell["image"].getpixel((0, 0))[0] for cell in cells] == [0, 1, 10, 11]
    assert cells[1]["target"].getpixel((7, 3)) == (0, 255, 0)
    assert cells[2]["target"] is None


def test_strip_has_the_target_and_the_samples_side_by_side(make_evaluation) -> None:
    strip = tabulate(make_evaluation()).strips["sign"]

    # Three images of 8 x 4 with 4 white columns after the first and the second.
    assert strip.size == (32, 4)
    row = numpy.asarray(strip)[2]
    assert row[7].tolist() == [0, 255, 0]
    assert row[8].tolist() == row[11].tolist() == [255, 255, 255]
    assert row[12].tolist() == [0, 0, 0]
    assert row[31].tolist() == [1, 1, 1]


def test_sources_stand_before_the_target(make_evaluation) -> None:
    evaluation = make_evaluation()
    grey = torch.full((3, 4, 8), 77, dtype=torch.uint8)
    first, second = evaluation.prompts
    prompts = (replace(first, sources=(grey, grey + 1)), second)
    table = tabulate(replace(evaluation, prompts=prompts))

    # Two sources, side by side.
    assert table.rows[0]["source"].size == (8 + 4 + 8, 4)
    assert table.rows[2]["source"] is None
    strip = table.strips["sign"]
    assert strip.width == 5 * 8 + 4 * 4
    assert [strip.getpixel((12 * place, 0))[0] for place in range(2)] == [77, 78]
    assert "source" not in to_markdown(table).splitlines()[0]


def test_table_is_bounded_in_prompts_samples_and_pixels(make_evaluation) -> None:
    table = tabulate(
        make_evaluation(prompts=MAX_PROMPTS + 3, samples=MAX_SAMPLES + 2, height=256, width=512)
    )

    assert list(table.strips) == ["sign", *(f"field-{n}" for n in range(1, MAX_PROMPTS))]
    assert len(table.rows) == MAX_PROMPTS * MAX_SAMPLES
    # Half of each side: proportions stay.
    assert table.rows[0]["image"].size == (MAX_SIDE, MAX_SIDE // 2)
