from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from glm_grpo.errors import StorageError
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import (
    CREDIT,
    OBJECTS,
    PIECES,
    Weighing,
    read_evaluation,
    read_metrics,
    read_table,
    read_weighing,
)
from glm_grpo.run.writing import (
    append_metrics,
    encode,
    store_failure,
    truncate_after,
    write_evaluation,
    write_rollout,
)
from glm_grpo.types import Evaluation, Experience, ImageBatch, PromptBatch, Rollout
from rewards.score_map import ScoreBox
from rewards.types import Prompt, RewardTable
from rewards.weighting import combine

HOSTILE = '<script>alert("x")</script>/../ 🙂'


def store_rollout(path: Path, experience: Experience, step: int) -> None:
    images = encode(experience.images)
    write_rollout(RunFolder(path), experience, images, step, combine="weighted_sum")


def store_evaluation(path: Path, evaluation: Evaluation) -> None:
    write_evaluation(RunFolder(path), evaluation, combine="weighted_sum")


def make_prompts() -> tuple[Prompt, ...]:
    target = torch.arange(3 * 4 * 4, dtype=torch.uint8).reshape(3, 4, 4)
    texts = ("CAT", "OPEN 24")
    return (Prompt("plain", "a red sign", texts=texts, target=target), Prompt(HOSTILE, HOSTILE))


def make_table() -> RewardTable:
    return RewardTable(
        names=("lpips", "aesthetic"),
        raw=torch.tensor([[[0.25, 0.5], [0.75, 0.5]], [[0.0, 1.0], [0.0, 0.125]]]),
        is_applicable=torch.tensor([[True, True], [False, True]]),
        weights=torch.tensor([0.5, 0.25]),
        std_floors=torch.tensor([0.125, 0.0625]),
    )


def make_images() -> ImageBatch:
    pixels = torch.arange(2 * 2 * 3 * 4 * 4).reshape(2, 2, 3, 4, 4).to(torch.uint8)
    return ImageBatch(pixels, decode_seeds=(2**63 - 1, 7))


def make_experience() -> Experience:
    table = make_table()
    return Experience(
        prompts=PromptBatch(make_prompts(), 2, 32, 32, seed=0, decode_seeds=(2**63 - 1, 7)),
        rollout=Rollout(
            token_ids=torch.arange(12).reshape(2, 2, 3),
            log_probs=-torch.arange(12.0).reshape(2, 2, 3),
            sampling_mask=None,
        ),
        images=make_images(),
        scores=table,
        totals=combine(table, mode="weighted_sum"),
        penalties=torch.tensor([[0.0, 0.5], [0.0, -0.65625]]),
        advantages=torch.tensor([[[-1.0], [1.0]], [[0.0], [0.0]]]),
    )


def make_evaluation(step: int) -> Evaluation:
    return Evaluation(
        step=step,
        prompts=make_prompts(),
        images=make_images(),
        scores=replace(make_table(), notes={"lpips": (("CAT", ""), ())}),
        totals=torch.tensor([[0.1, 0.2], [0.3, 0.4]]),
        entropy=torch.tensor([1.0, 2.0]),
    )


def all_files(path: Path) -> list[str]:
    return sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())


def test_append_metrics_writes_one_json_object_a_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    append_metrics(folder, 1, {"reward/mean": 0.1, "loss/total": math.nan})
    append_metrics(folder, 2, {"reward/mean": -math.inf, "loss/total": 1e-300})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines == [
        '{"step": 1, "reward/mean": 0.1, "loss/total": null}',
        '{"step": 2, "reward/mean": null, "loss/total": 1e-300}',
    ]
    assert read_metrics(folder) == [json.loads(line) for line in lines]


def test_write_rollout_stores_every_column_of_every_image(tmp_path: Path) -> None:
    store_rollout(tmp_path, make_experience(), 10)
    table = read_table(RunFolder(tmp_path).rollout_path(10))
    types = {field.name: str(field.type) for field in table.schema}
    assert types["decode_seed"] == "int64"
    assert types["token_ids"] == "list<element: int32>"
    assert types["raw/lpips"] == types["advantage"] == "float"
    columns = table.to_pydict()
    images = columns.pop("image")
    assert columns == {
        "step": [10] * 4,
        "prompt_id": ["plain", "plain", HOSTILE, HOSTILE],
        "prompt": ["a red sign", "a red sign", HOSTILE, HOSTILE],
        "texts": [["CAT", "OPEN 24"]] * 2 + [[]] * 2,
        "sample": [0, 1, 0, 1],
        "decode_seed": [2**63 - 1, 2**63 - 1, 7, 7],
        "target": ["images/train-targets/plain.png"] * 2 + [None] * 2,
        "token_ids": [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]],
        "log_probs": [[0, -1, -2], [-3, -4, -5], [-6, -7, -8], [-9, -10, -11]],
        "raw/lpips": [0.25, 0.75, None, None],
        "raw/aesthetic": [0.5, 0.5, 1.0, 0.125],
        # 0.5 * 0.25 + 0.25 * 0.5 and so on; alone, aesthetic takes over the weight of lpips.
        "total": [0.25, 0.5, 0.75, 0.09375],
        "penalty": [0, 0.5, 0, -0.65625],
        "advantage": [-1, 1, 0, 0],
        "is_flat": [False, False, True, True],
    }
    assert images[:2] == ["images/step-000010/plain-0.png", "images/step-000010/plain-1.png"]


def test_write_rollout_stores_further_columns_of_rows(tmp_path: Path) -> None:
    experience = make_experience()
    first, second = experience.prompts.prompts
    tagged = replace(first, metadata={"tag": "é", "include": [{"count": 2}]})
    prompts = replace(experience.prompts, prompts=(tagged, second))
    store_rollout(tmp_path, replace(experience, prompts=prompts), 10)
    (column,) = read_table(RunFolder(tmp_path).rollout_path(10), ["metadata"]).to_pydict().values()
    assert [json.loads(row) for row in column] == [{**tagged.metadata}] * 2 + [{}] * 2


def test_write_rollout_stores_what_was_found(tmp_path: Path) -> None:
    experience = make_experience()
    scores = replace(experience.scores, objects={"lpips": ((("2 red car", "no dog"), ()), ())})
    store_rollout(tmp_path, replace(experience, scores=scores), 10)
    columns = read_table(RunFolder(tmp_path).rollout_path(10), [OBJECTS]).to_pydict()
    assert columns == {"objects/lpips": [["2 red car", "no dog"], [], None, None]}


def test_write_rollout_stores_what_places_and_letters_earned(tmp_path: Path) -> None:
    experience = make_experience()
    # In half precision 1/3 is 1365/4096 and 1e-4 is 1678/2^24; larger numbers become the largest.
    places = torch.tensor([[[1 / 3, -0.5], [0.0, 1e6]], [[-1e-4, 0.5], [0.0, -1e6]]])
    letter = ScoreBox(0.25, 1.5, 2.0, 3.0, 4.0, "<", "html:0")
    experience = replace(
        experience,
        place_credit=places[None].repeat(2, 1, 1, 1),
        scores=replace(experience.scores, score_boxes={"lpips": (((letter, letter), ()), ())}),
    )
    store_rollout(tmp_path, experience, 10)
    table = read_table(RunFolder(tmp_path).rollout_path(10), ("step", CREDIT, PIECES))
    assert table.column_names == ["step", "credit", "pieces/lpips"]
    assert str(table.schema.field("credit").type.value_type.value_type) == "halffloat"
    columns = table.to_pydict()
    first, second = [[1365 / 4096, -0.5], [0, 65504]], [[-1678 / 2**24, 0.5], [0, -65504]]
    assert columns["credit"] == [first, second] * 2
    edges = {"left": 1.5, "top": 2.0, "right": 3.0, "bottom": 4.0}
    stored = {"text": "<", "kind": "html:0", "value": 0.25, **edges}
    assert columns["pieces/lpips"] == [[stored, stored], [], None, None]


def test_write_rollout_stores_images_without_loss(tmp_path: Path) -> None:
    experience = make_experience()
    store_rollout(tmp_path, experience, 10)
    paths = read_table(RunFolder(tmp_path).rollout_path(10))["image"].to_pylist()
    for path, pixels in zip(paths, experience.images.pixels.flatten(0, 1), strict=True):
        stored = np.asarray(Image.open(tmp_path / path))
        assert stored.tolist() == pixels.permute(1, 2, 0).tolist()
    assert len(set(paths)) == 4


def test_write_rollout_stores_how_totals_were_weighted(tmp_path: Path) -> None:
    store_rollout(tmp_path, make_experience(), 10)
    assert read_weighing(RunFolder(tmp_path).rollout_path(10)) == Weighing(
        weights={"lpips": 0.5, "aesthetic": 0.25},
        std_floors={"lpips": 0.125, "aesthetic": 0.0625},
        combine="weighted_sum",
    )


def test_write_rollout_leaves_no_table_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match="No space left on device"):
        store_rollout(tmp_path, make_experience(), 10)
    assert all_files(tmp_path) == []


def test_write_evaluation_stores_scores_texts_and_targets(tmp_path: Path) -> None:
    store_evaluation(tmp_path, make_evaluation(5))
    table = read_evaluation(RunFolder(tmp_path), 5)
    columns = table.to_pydict()
    assert columns["texts"] == [["CAT", "OPEN 24"]] * 2 + [[]] * 2
    assert str(table.schema.field("texts").type) == "list<element: string>"
    assert columns["note/lpips"] == ["CAT", "", None, None]
    assert columns["raw/lpips"] == [0.25, 0.75, None, None]
    assert columns["total"] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert columns["target"] == ["images/targets/plain.png"] * 2 + [None] * 2
    assert columns["image"][0] == "images/eval-000005/plain-0.png"
    target = np.asarray(Image.open(tmp_path / "images/targets/plain.png"))
    # Pixel (row 1, column 2) of the three planes of 16 values each.
    assert target[1, 2].tolist() == [6, 22, 38]


def test_targets_of_training_and_of_evaluation_may_share_an_id(tmp_path: Path) -> None:
    experience = make_experience()
    store_rollout(tmp_path, experience, 1)
    other = replace(experience.prompts.prompts[0], target=torch.zeros(3, 4, 4, dtype=torch.uint8))
    evaluation = make_evaluation(1)
    store_evaluation(tmp_path, replace(evaluation, prompts=(other, evaluation.prompts[1])))
    trained = np.asarray(Image.open(tmp_path / "images/train-targets/plain.png"))
    assert trained[1, 2].tolist() == [6, 22, 38]
    assert np.asarray(Image.open(tmp_path / "images/targets/plain.png")).max() == 0


def store_steps(path: Path, first: int, last: int) -> None:
    for step in range(first, last + 1):
        store_rollout(path, make_experience(), step)
        append_metrics(RunFolder(path), step, {"reward/mean": step / 7, "loss/total": math.nan})
        store_evaluation(path, make_evaluation(step))
        append_metrics(RunFolder(path), step, {"eval/total": step / 3})


def test_truncate_after_makes_a_resumed_run_equal_to_an_uninterrupted_one(tmp_path: Path) -> None:
    store_steps(tmp_path / "whole", 1, 3)
    store_steps(tmp_path / "resumed", 1, 3)
    # Killed while it wrote step 4.
    with (tmp_path / "resumed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/mean": 0.5}\n{"step": 4, "eval/to')
    (tmp_path / "resumed" / "rollouts" / ".step-000004.parquet.9.tmp").write_bytes(b"PAR1")
    (tmp_path / "resumed" / "images" / ".step-000004.9.tmp").mkdir()
    (tmp_path / "resumed" / "images" / "targets" / ".sign.png.9.tmp").write_bytes(b"")
    (tmp_path / "resumed" / "gallery" / "data").mkdir(parents=True)
    (tmp_path / "resumed" / "gallery" / "data" / ".run.js.9.tmp").write_bytes(b"")

    truncate_after(RunFolder(tmp_path / "resumed"), 1)
    assert all_files(tmp_path / "resumed" / "rollouts") == ["step-000001.parquet"]
    assert all_files(tmp_path / "resumed" / "evaluations") == ["step-000001.parquet"]
    images = {path.name for path in (tmp_path / "resumed" / "images").iterdir()}
    assert images == {"step-000001", "eval-000001", "targets", "train-targets"}

    store_steps(tmp_path / "resumed", 2, 3)
    assert all_files(tmp_path / "resumed") == all_files(tmp_path / "whole")
    for name in all_files(tmp_path / "whole"):
        assert (tmp_path / "resumed" / name).read_bytes() == (
            tmp_path / "whole" / name
        ).read_bytes()


def test_truncate_after_takes_a_folder_without_records(tmp_path: Path) -> None:
    truncate_after(RunFolder(tmp_path), 0)
    assert all_files(tmp_path) == []


def test_store_failure_keeps_the_images_of_one_prompt_without_loss(tmp_path: Path) -> None:
    images = make_images().pixels[1]
    place = store_failure(RunFolder(tmp_path), images, 3)
    assert place == tmp_path / "failures" / "step-000003"
    assert all_files(place) == ["0.png", "1.png"]
    for sample, pixels in enumerate(images):
        stored = np.asarray(Image.open(place / f"{sample}.png"))
        assert stored.tolist() == pixels.permute(1, 2, 0).tolist()
    # A run that goes on keeps them.
    truncate_after(RunFolder(tmp_path), 2)
    assert all_files(place) == ["0.png", "1.png"]
