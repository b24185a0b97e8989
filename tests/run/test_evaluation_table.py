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
from glm_grpo.types import Evaluation


def without_target(evaluation: Evaluation) -> Evaluation:
    prompts = tuple(replace(prompt, target=None) for prompt in evaluation.prompts)
    return replace(evaluation, prompts=prompts)


def test_table_has_a_row_a_picture_and_leaves_empty_what_does_not_apply(make_evaluation) -> None:
    table = tabulate(make_evaluation())

    assert table.columns == (
        *("prompt_id", "prompt", "sample", "target", "image", "total", "clip", "ocr", "ocr note"),
    )
    cells = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [cell["prompt_id"] for cell in cells] == ["sign", "sign", "field-1", "field-1"]
    assert [cell["prompt"] for cell in cells][1:3] == ['a sign "CAT"', "a | field"]
    assert [cell["sample"] for cell in cells] == [0, 1, 0, 1]
    # Not 0.009999999776482582, which is what float32 makes of 0.01.
    assert [cell["total"] for cell in cells] == [0.0, 0.02, 0.2, 0.22]
    assert [cell["clip"] for cell in cells] == [0.0, 0.01, 0.1, 0.11]
    assert [cell["ocr"] for cell in cells] == [0.0, 0.01, None, None]
    assert [cell["ocr note"] for cell in cells] == ["word 0", "word 1", None, None]
    assert [cell["image"].getpixel((0, 0)) for cell in cells] == [
        *((0, 0, 0), (1, 1, 1), (10, 10, 10), (11, 11, 11)),
    ]
    assert cells[1]["target"].getpixel((7, 3)) == (0, 255, 0)
    assert cells[2]["target"] is None


def test_strip_has_the_target_and_the_samples_side_by_side(make_evaluation) -> None:
    strip = tabulate(make_evaluation()).strips["sign"]

    # Three pictures of 8 x 4 with 4 white columns after the first and the second.
    assert strip.size == (32, 4)
    row = numpy.asarray(strip)[2]
    assert row[7].tolist() == [0, 255, 0]
    assert row[8].tolist() == row[11].tolist() == [255, 255, 255]
    assert row[12].tolist() == [0, 0, 0]
    assert row[31].tolist() == [1, 1, 1]


def test_without_any_target_there_is_no_column_for_it(make_evaluation) -> None:
    table = tabulate(without_target(make_evaluation()))

    assert "target" not in table.columns
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert table.strips["sign"].width == 8 + 4 + 8


def test_sources_stand_before_the_target(make_evaluation) -> None:
    evaluation = make_evaluation()
    grey = torch.full((3, 4, 8), 77, dtype=torch.uint8)
    first, second = evaluation.prompts
    prompts = (replace(first, sources=(grey, grey + 1)), second)
    table = tabulate(replace(evaluation, prompts=prompts))

    assert table.columns[2:5] == ("sample", "source", "target")
    # Two sources, side by side.
    assert table.rows[0][3].size == (8 + 4 + 8, 4)
    assert table.rows[2][3] is None
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
    image = table.rows[0][table.columns.index("image")]
    # Half of each side: proportions stay.
    assert image.size == (MAX_SIDE, MAX_SIDE // 2)
