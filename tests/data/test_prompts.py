from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from glm_grpo.config import compose_config
from glm_grpo.data.prompts import (
    PromptSet,
    batch_for_step,
    evaluation_batches,
    load_prompts,
)
from glm_grpo.errors import DataError
from glm_grpo.models.base import ReservedTokens
from glm_grpo.models.find import find_model
from glm_grpo.models.glm_image.loading import check_model
from glm_grpo.setup.prepared_run import prepare


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, colour in (("red.png", (255, 0, 0)), ("blue.png", (0, 0, 255))):
        Image.new("RGB", (40, 40), colour).save(tmp_path / name)
    return tmp_path


@pytest.fixture(scope="module")
def reserved() -> ReservedTokens:
    """Of the embedded model."""
    return check_model(find_model("tiny").path)


def write_rows(folder: Path, *rows: dict[str, object]) -> str:
    path = folder / "metadata.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def numbered_set(tmp_path: Path, count: int) -> PromptSet:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(f"prompt {number}" for number in range(count)))
    return load_prompts(str(path), height=32, width=64)


def ids_of_steps(prompt_set: PromptSet, steps: range, per_step: int, seed: int = 0) -> list[str]:
    return [
        prompt.prompt_id
        for step in steps
        for prompt in batch_for_step(
            prompt_set, step=step + 1, seed=seed, prompts_per_step=per_step, group_size=2
        ).prompts
    ]


MISSPELT = (
    "the field 'tagret' is not read (line 1, line 2, line 3, ...); rename it to 'target', or to "
    "something else if it has another meaning"
)


def test_a_field_that_is_misspelt_is_refused_with_the_known_one(folder: Path) -> None:
    # Not what nearly names a field that is there, or one that this run does not read.
    row = {"prompt": "a", "tagret": "red.png", "prompts": "?", "score": 1.0, "sorce": "red.png"}
    path = write_rows(folder, *[row] * 4)
    with pytest.raises(DataError, match=f"^{re.escape(f'{path}: {MISSPELT}')}$"):
        load_prompts(path, height=32, width=32)


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([{"target": "red.png", "target_img": "x", "Text": "UP"}], ["'Text'"]),
        # The others have targets.
        ([{"target": "red.png"}, {"taget": "red.png"}, {"target": "red.png"}], ["'taget'"]),
        # Without it, objects would count above another threshold.
        (
            [{"include": [{"class": "dog", "count": 1}], "Tag": "counting"}, {"tags": "x"}],
            ["'Tag'"],
        ),
        # A field of its own.
        ([{"target": "red.png", "targets": 2}, {"targets": 0}, {"target": "red.png"}], []),
    ],
)
def test_a_field_is_misspelt_where_its_row_lacks_the_known_one(
    folder: Path, rows: list[dict[str, object]], named: list[str]
) -> None:
    path = write_rows(folder, *({"prompt": "a", **row} for row in rows))
    said = []
    try:
        load_prompts(path, height=32, width=32)
    except DataError as error:
        said = re.findall("the field (.*?) is not read", str(error))
    assert said == named


def test_a_misspelt_column_of_a_table_is_warned_of(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "rows.parquet"
    table = pyarrow.table({"prompt": [*"abcd"], "tagret": ["red.png"] * 4})
    pyarrow.parquet.write_table(table, path)
    load_prompts(str(path), height=32, width=32)
    assert caplog.messages == [f"{path}: {MISSPELT.replace('line', 'row')}"]


def test_load_prompts_gives_prompts_with_images_at_the_size_of_the_rollout(folder: Path) -> None:
    path = write_rows(
        folder,
        {"prompt": 'a red sign "UP"', "file_name": "red.png"},
        {"prompt": "no image", "id": "bare"},
        {"prompt": "a blue one", "file_name": "blue.png", "text": "DOWN"},
    )
    prompt_set = load_prompts(path, height=32, width=64)
    assert len(prompt_set) == 3
    first, second, third = (prompt_set[index] for index in range(3))
    assert (first.prompt_id, first.prompt, first.texts) == ("00000", 'a red sign "UP"', ("UP",))
    assert first.target is not None
    assert first.target.dtype == torch.uint8
    assert first.target.shape == (3, 32, 64)
    assert first.target.float().mean((1, 2)).tolist() == [255.0, 0.0, 0.0]
    assert (second.prompt_id, second.texts, second.target) == ("bare", (), None)
    assert (third.prompt_id, third.texts) == ("00002", ("DOWN",))


def test_a_parquet_column_of_image_files_gives_targets(folder: Path) -> None:
    table = pyarrow.table({"prompt": ["a"], "image": [(folder / "red.png").read_bytes()]})
    pyarrow.parquet.write_table(table, folder / "rows.parquet")
    target = load_prompts(str(folder / "rows.parquet"), height=32, width=32)[0].target
    assert target is not None
    assert target.float().mean((1, 2)).tolist() == [255.0, 0.0, 0.0]


def test_sources_that_a_run_does_not_read_are_warned_of(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(folder, {"prompt": "a", "source": "red.png"}, {"prompt": "b"})
    load_prompts(path, height=32, width=32)
    (said,) = caplog.messages
    assert said.startswith(f"{path}: the field source is ignored")


def test_images_that_hardly_fit_the_rollout_are_warned_of(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Of 64 x 32: half of the last two is left, and the last is enlarged exactly twice.
    sizes = {"long": (300, 40), "icon": (8, 8), "high": (64, 65), "square": (64, 64), "2": (32, 32)}
    for name, size in sizes.items():
        Image.new("RGB", size).save(folder / f"{name}.png")
    fine = [{"prompt": "a", "target": f"{name}.png"} for name in ("square", "2")]
    bad = [
        {"prompt": "b", "target": f"{name}.png"}
        for name in ("long", "icon", "high", "icon", "icon")
    ]
    path = write_rows(folder, *fine, {"prompt": "c"}, *bad)
    load_prompts(path, height=32, width=64)
    # 300 x 40 is cut to 80 x 40, 8 x 8 to 8 x 4, 64 x 65 to 64 x 32.
    (said,) = caplog.messages
    assert said.startswith(f"{path}: 5 of the target images hardly fit")
    assert "line 4 (300 x 40: 27 % of it is left), line 5 (8 x 8: enlarged 8 times), " in said
    assert "line 6 (64 x 65: 49 % of it is left), ...; crop or replace them" in said
    caplog.clear()
    path = write_rows(folder, {"prompt": "a", "target": "square.png", "source": "icon.png"})
    load_prompts(path, height=32, width=64, sources=1)
    assert [said.partition(" hardly")[0] for said in caplog.messages] == [
        f"{path}: 1 of the source images"
    ]


def test_the_first_ten_errors_of_a_file_are_reported_together(folder: Path) -> None:
    rows = [{"prompt": ""}, {"prompt": "a"}, *[{"prompt": "a", "target": "none.png"}] * 12]
    with pytest.raises(DataError) as refused:
        load_prompts(write_rows(folder, *rows), height=32, width=32)
    first, missing, images, end = str(refused.value).split("\n- ")
    assert first == "3 checks failed:"
    assert re.search(r"line 1: 'prompt' is missing", missing)
    # Rows with the same fault share a line.
    places = ", ".join(f"line {number}" for number in range(3, 12))
    assert re.search(rf", {places}: image .*none\.png", images)
    assert end.endswith("line 12: this row and those after it are not checked yet")
    # The tenth is the last one.
    with pytest.raises(DataError) as refused:
        load_prompts(write_rows(folder, *rows[:11]), height=32, width=32)
    assert str(refused.value).startswith("2 checks failed:")


@pytest.mark.parametrize(
    ("prompt", "token"),
    [
        ("a <|image|> of a cat", "<|image|>"),
        ("<|image_start|>a cat", "<|image_start|>"),
        ("a cat<|image_end|>", "<|image_end|>"),
        ("a cat <|grid_bos|>4 4<|grid_eos|>", "<|grid_bos|>"),
        ("a cat <|pad|>", "<|pad|>"),
        ('a sign saying "</s>"', "</s>"),
        ('a sign saying "A<pad>"', "<pad>"),
        ("a dog's <pad>, a cat's", "<pad>"),  # no quotation, but read as one
    ],
)
def test_load_prompts_refuses_what_is_a_token_of_the_model(
    folder: Path, reserved: ReservedTokens, prompt: str, token: str
) -> None:
    path = write_rows(folder, {"prompt": "a dog"}, {"prompt": prompt})
    with pytest.raises(DataError, match=rf"line 2: 'prompt'.* contains {re.escape(repr(token))}"):
        load_prompts(path, height=32, width=32, reserved=reserved)


def test_load_prompts_takes_what_only_looks_like_a_token(
    folder: Path, reserved: ReservedTokens
) -> None:
    """Tokens of glyphs matter in what their encoder reads, and `text` reaches no tokenizer."""
    prompts = ("<|code_7|> <image> [MASK]", "a <pad>, \u201e</s>\u201c", "< | image | >")
    rows = [{"prompt": prompt, "text": "<|image|>"} for prompt in prompts]
    prompt_set = load_prompts(write_rows(folder, *rows), height=32, width=32, reserved=reserved)
    assert prompt_set.captions() == [*prompts]


def test_a_run_refuses_such_a_prompt_before_a_model_is_loaded(
    folder: Path, configs_dir: Path
) -> None:
    (folder / "good.txt").write_text("a dog\n" * 8)
    (folder / "bad.txt").write_text("a dog\na <|image_end|>\n")
    data = [f"data.path={folder / 'good.txt'}", f"data.eval_path={folder / 'bad.txt'}"]
    with pytest.raises(DataError, match=r"bad\.txt, line 2: .*<\|image_end\|>"):
        prepare(compose_config(configs_dir, "tiny", data))


def test_a_run_refuses_fewer_prompts_than_a_step_takes_before_a_model_is_loaded(
    tmp_path: Path, configs_dir: Path
) -> None:
    path = numbered_set(tmp_path, 3).path
    data = (f"data.path={path}", f"data.eval_path={path}")
    config = compose_config(configs_dir, "tiny", [*data, "rollout.prompts_per_step=4"])
    with pytest.raises(DataError, match="prompts_per_step 4: .* 3 prompts"):
        prepare(config)


def test_an_image_that_vanishes_after_loading_is_an_error_of_its_prompt(folder: Path) -> None:
    prompt_set = load_prompts(
        write_rows(folder, {"prompt": "x", "file_name": "red.png"}), height=32, width=32
    )
    (folder / "red.png").unlink()
    with pytest.raises(DataError, match=r"line 1: image .*red\.png does not exist"):
        prompt_set[0]


def test_batch_for_step_carries_size_group_and_seeds(tmp_path: Path) -> None:
    batch = batch_for_step(
        numbered_set(tmp_path, 5), step=4, seed=7, prompts_per_step=2, group_size=4
    )
    assert (batch.group_size, batch.height, batch.width) == (4, 32, 64)
    assert len(batch.prompts) == len(batch.decode_seeds) == 2
    assert len({batch.seed, *batch.decode_seeds}) == 3


def test_batch_for_step_is_a_pure_function_of_seed_and_step(tmp_path: Path) -> None:
    def batch(step: int, seed: int) -> tuple[object, ...]:
        made = batch_for_step(
            numbered_set(tmp_path, 50), step=step, seed=seed, prompts_per_step=4, group_size=2
        )
        return tuple(prompt.prompt_id for prompt in made.prompts), made.seed, made.decode_seeds

    torch.manual_seed(1)
    first = batch(11, seed=0)
    torch.manual_seed(2)
    assert batch(11, seed=0) == first
    for other in (batch(12, seed=0), batch(11, seed=1)):
        assert all(here != there for here, there in zip(first, other, strict=True))


@pytest.mark.parametrize(("count", "per_step"), [(8, 4), (7, 3), (5, 5), (3, 2)])
def test_batch_for_step_deals_every_prompt_once_an_epoch_and_differs_within_a_batch(
    tmp_path: Path, count: int, per_step: int
) -> None:
    prompt_set = numbered_set(tmp_path, count)
    epochs = 4
    steps = range(-(-epochs * count // per_step))
    dealt = ids_of_steps(prompt_set, steps, per_step)
    everything = {f"{number:05d}" for number in range(count)}
    for epoch in range(epochs):
        assert set(dealt[epoch * count : (epoch + 1) * count]) == everything
    for step in steps:
        batch = dealt[step * per_step : (step + 1) * per_step]
        assert len(set(batch)) == per_step


def test_batch_for_step_shuffles_each_epoch_anew_and_without_favour(tmp_path: Path) -> None:
    prompt_set = numbered_set(tmp_path, 6)
    dealt = ids_of_steps(prompt_set, range(150), per_step=6)
    epochs = [tuple(dealt[start : start + 6]) for start in range(0, len(dealt), 6)]
    # 150 draws of the 720 orders give 135 different ones on average.
    assert len(set(epochs)) > 115
    # Each of 6 prompts comes first in about 150 / 6 = 25 epochs (standard deviation 4.6).
    firsts = Counter(epoch[0] for epoch in epochs)
    assert len(firsts) == 6
    assert all(9 < count < 41 for count in firsts.values())


def test_batch_for_step_refuses_more_prompts_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"prompts_per_step 4: .*prompts\.txt contains only 3"):
        batch_for_step(numbered_set(tmp_path, 3), step=1, seed=0, prompts_per_step=4, group_size=2)


def test_evaluation_batches_hold_all_prompts_in_order(tmp_path: Path) -> None:
    batches = evaluation_batches(
        numbered_set(tmp_path, 5), range(5), prompts_per_batch=2, samples_per_prompt=3, seed=0
    )
    assert [[prompt.prompt_id for prompt in batch.prompts] for batch in batches] == [
        ["00000", "00001"],
        ["00002", "00003"],
        ["00004"],
    ]
    assert {(batch.group_size, batch.height, batch.width) for batch in batches} == {(3, 32, 64)}


def test_evaluation_seeds_do_not_depend_on_how_prompts_are_batched(tmp_path: Path) -> None:
    prompt_set = numbered_set(tmp_path, 5)

    def seeds(per_batch: int, seed: int) -> tuple[set[int], list[int]]:
        batches = evaluation_batches(
            prompt_set, range(5), prompts_per_batch=per_batch, samples_per_prompt=2, seed=seed
        )
        decode_seeds = [value for batch in batches for value in batch.decode_seeds]
        return {batch.seed for batch in batches}, decode_seeds

    assert seeds(2, seed=0) == seeds(5, seed=0)
    sampling, decoding = seeds(2, seed=0)
    assert len(sampling) == 1
    assert len(set(decoding)) == 5
    other_sampling, other_decoding = seeds(2, seed=1)
    assert sampling.isdisjoint(other_sampling)
    assert set(decoding).isdisjoint(other_decoding)
