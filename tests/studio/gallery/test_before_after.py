from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from glm_grpo.config import compose_config, to_yaml
from glm_grpo.run.folder import RunFolder, write_atomically
from glm_grpo.run.tables import SummaryRow, Weighing, weighing_metadata
from glm_grpo.studio.gallery.before_after import choose_cases, write_before_after

ReadPage = Callable[[Path], Any]
HOSTILE = '"><script>alert(1)</script>\' onerror="x" {{ 7 * 7 }} & שלום 🙂 ' + "w" * 5000
SUMMARY = (
    SummaryRow("ocr", before=0.5, after=0.75, difference=0.25, low=0.125, high=0.375),
    SummaryRow("lpips", before=0.5, after=0.25, difference=-0.25, low=-0.5, high=-0.125),
    SummaryRow("ssim", before=0.5, after=0.5625, difference=0.0625, low=-0.125, high=0.25),
    SummaryRow("few", before=0.5, after=0.75, difference=0.25, low=math.nan, high=math.nan),
    SummaryRow("total", before=0.25, after=0.375, difference=0.125, low=0.0625, high=0.1875),
)
# Mean totals by prompt: changes of +0.25, -0.5, +0.5 and 0.
BEFORE = {"rose": [0.25, 0.5], "fell": [0.75], "leapt": [0.25], "stayed": [0.5]}
AFTER = {"rose": [0.5, 0.75], "fell": [0.25], "leapt": [0.75], "stayed": [0.5]}


def store_image(folder: RunFolder, path: str) -> str:
    content = io.BytesIO()
    Image.new("RGB", (16, 8)).save(content, format="PNG")
    write_atomically(folder.path / path, content.getvalue())
    return path


def store_evaluation(
    folder: RunFolder, step: int, totals: Mapping[str, list[float]], **overrides: Any
) -> None:
    """An evaluation as training stores it; `totals` by prompt id."""
    rows = [
        {
            "step": step,
            "prompt_id": prompt_id,
            "prompt": f"prompt {prompt_id}",
            "texts": [],
            "sample": sample,
            "decode_seed": 7,
            "raw/ocr": 0.625,
            "raw/lpips": None,
            "total": total,
            "target": store_image(folder, f"images/targets/{prompt_id}.png"),
            "image": store_image(folder, f"images/eval-{step:06d}/{prompt_id}-{sample}.png"),
            **overrides,
        }
        for prompt_id, group in totals.items()
        for sample, total in enumerate(group)
    ]
    path = folder.evaluation_path(step)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(rows)
    metadata = weighing_metadata(Weighing({}, {}, "weighted_sum"))
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), path)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with three evaluations and no config."""
    folder = RunFolder(tmp_path / "2026-01-02" / "03-04-05")
    store_evaluation(folder, 0, BEFORE)
    store_evaluation(folder, 5, {prompt_id: [0.123] for prompt_id in BEFORE})
    store_evaluation(folder, 10, AFTER)
    return folder


def store_config(folder: RunFolder, configs_dir: Path, *overrides: str) -> str:
    text = to_yaml(compose_config(configs_dir, "tiny", list(overrides)))
    write_atomically(folder.config_path, text.encode())
    return text


def headings(page: Any) -> list[str]:
    return [text for text in page.texts if re.match(r"(Best|Median|Worst|The only) .*: ", text)]


def test_choose_cases_takes_the_best_the_middle_and_the_worst() -> None:
    changes = {"a": 0.0, "b": -1.0, "c": 2.0}
    chosen = {"Best change": "c", "Median change": "a", "Worst change": "b"}
    assert choose_cases(changes) == chosen
    # Of four, the middle two are a and d; d changed for the worse.
    assert choose_cases(changes | {"d": -0.5}) == chosen | {"Median change": "d"}
    # None is shown twice.
    assert choose_cases({}) == {}
    assert choose_cases({"a": 1.0}) == {"The only prompt": "a"}
    assert choose_cases({"a": 1.0, "b": 2.0}) == {"Best change": "b", "Worst change": "a"}


def test_page_shows_the_chosen_prompts_and_states_the_rule(
    folder: RunFolder, read_page: ReadPage
) -> None:
    page = read_page(write_before_after(folder, SUMMARY))
    assert headings(page) == [
        "Best change: +0.500",
        "Median change: +0.000",
        "Worst change: -0.500",
    ]
    text = " ".join(page.texts)
    assert "from step 0 to step 10" in text
    # The evaluation in between is not shown, nor the prompt that rose by 0.25.
    assert "0.123" not in text
    assert "prompt rose" not in text


def test_page_shows_thumbnails_that_lead_to_the_large_view(
    folder: RunFolder, read_page: ReadPage
) -> None:
    path = write_before_after(folder, SUMMARY)
    page = read_page(path)
    assert list(page.alternatives())[:3] == [
        "thumbs/targets/leapt.webp",
        "thumbs/eval-000000/leapt-0.webp",
        "thumbs/eval-000010/leapt-0.webp",
    ]
    links = [str(link["href"]) for link in page.all("a")]
    assert links[:3] == [
        "index.html",
        "index.html#progress?prompt=leapt&step=10&sample=0&large=1&first=target",
        "index.html#progress?prompt=leapt&step=0&sample=0&large=1",
    ]
    assert page.alternatives()["thumbs/eval-000010/fell-0.webp"] == ("After, sample 1: prompt fell")


def test_page_shows_every_sample_with_its_scores_and_the_seed(
    tmp_path: Path, read_page: ReadPage
) -> None:
    folder = RunFolder(tmp_path)
    for step in (0, 10):
        store_evaluation(folder, step, {"a": [0.25, 0.5]}, decode_seed=2**63 - 1, texts=["DOG"])
    page = read_page(write_before_after(folder, ()))
    assert len(page.all("img")) == 5
    for sample, total in ((1, "0.250"), (2, "0.500")):
        scores = ["asked", "DOG", "total", total, "ocr", "0.625", "lpips", "does not apply"]
        assert page.after(f"After, sample {sample}", len(scores)) == scores
    assert "Seed of the decoder's noise: 9223372036854775807." in page.texts


def test_page_shows_what_was_read_with_its_wrong_letters_marked(
    tmp_path: Path, configs_dir: Path
) -> None:
    folder = RunFolder(tmp_path)
    folder.config_path.write_text(to_yaml(compose_config(configs_dir, "tiny", [])))
    notes = {0: "", 10: "D0G <b>"}
    for step, note in notes.items():
        store_evaluation(folder, step, {"a": [0.25]}, texts=["DOG"], **{"note/ocr": note})
    page = write_before_after(folder, ()).read_text(encoding="utf-8")
    before, after = re.findall(r"<figcaption>(?:Before|After)(.*?)</figcaption>", page, re.DOTALL)
    assert re.search(r"read</span>\s*<span class=\"soft\">nothing</span>", before)
    assert "D<mark>0</mark>G <mark>&lt;b&gt;</mark>" in after


def test_page_shows_what_was_found_of_the_objects_that_were_asked_for(
    tmp_path: Path, configs_dir: Path
) -> None:
    folder = RunFolder(tmp_path)
    folder.config_path.write_text(to_yaml(compose_config(configs_dir, "tiny", [])))
    asked = {"metadata": '{"include": [{"class": "dog", "count": 2}]}'}
    # As a version stored it that did not say what was found.
    store_evaluation(folder, 0, {"a": [0.25]}, **asked)
    new = {"objects/mine": ["<dog>"], "note/mine": "asked 2 dog, found 1"}
    store_evaluation(folder, 10, {"a": [0.25]}, **asked, **new)
    page = write_before_after(folder, ()).read_text(encoding="utf-8")
    before, after = re.findall(r"<figcaption>(?:Before|After)(.*?)</figcaption>", page, re.DOTALL)
    assert '<strong dir="auto">2 dog</strong>' in before
    assert "found" not in before
    assert re.search(r"found</span>\s*<span dir=\"auto\"><mark>&lt;dog&gt;</mark>", after)


def test_page_says_where_an_image_is_missing(folder: RunFolder, read_page: ReadPage) -> None:
    (folder.path / "images/eval-000010/leapt-0.png").unlink()
    page = read_page(write_before_after(folder, SUMMARY))
    assert page.texts.count("Image missing") == 1
    assert "thumbs/eval-000010/leapt-0.webp" not in page.alternatives()
    assert page.after("Image missing", 3) == ["After, sample 1", "total", "0.750"]


def test_page_says_in_words_what_was_trained(
    folder: RunFolder, configs_dir: Path, read_page: ReadPage
) -> None:
    store_config(
        folder,
        configs_dir,
        *("train.steps=20", "rollout.prompts_per_step=4", "rollout.group_size=8"),
        "train.micro_batch_size=32",
        *("reward.terms.lpips.weight=-0.4", "reward.terms.ocr.weight=0"),
        *("loss.kl_coef=0", "train.seed=3", "eval.seed=4"),
    )
    text = " ".join(read_page(write_before_after(folder, SUMMARY)).texts)
    for words in (
        "Before and after: 2026-01-02 / 03-04-05",
        "20 steps",
        # 10 steps of 4 x 8.
        "320 images",
        "128 x 128 pixels",
        "tiny:train",
        "- 0.4 lpips + 0.2 ssim + 0.1 aesthetic",
        "lpips -0.4 LPIPS to the prompt's target image",
        "No KL penalty",
        "seed 3",
        "seed 4",
    ):
        assert words in text, words


def test_page_says_what_supervised_training_and_a_decoder_of_one_pass_do(
    folder: RunFolder, configs_dir: Path, read_page: ReadPage
) -> None:
    store_config(folder, configs_dir, "train.method=sft", "decode.steps=null")
    text = " ".join(read_page(write_before_after(folder, SUMMARY)).texts)
    assert "target images of tiny:train" in text
    assert "supervised fine-tuning" in text
    for words in ("GRPO", "KL"):
        assert words not in text.partition("Reward:")[0], words


def test_page_speaks_of_no_other_terms_where_there_is_one(
    folder: RunFolder, configs_dir: Path, read_page: ReadPage
) -> None:
    others = [f"~reward.terms.{name}" for name in ("lpips", "ssim", "aesthetic")]
    store_config(folder, configs_dir, *others)
    text = " ".join(read_page(write_before_after(folder, ())).texts)
    assert "the score times its weight." in text
    assert "share its weight" not in text


def test_page_names_no_folder_of_the_machine_but_in_the_settings(
    folder: RunFolder, configs_dir: Path, read_page: ReadPage
) -> None:
    paths = (
        "model.path=/secret/model",
        "data.path=/secret/a.jsonl",
        "data.eval_path=/secret/b.txt",
    )
    store_config(folder, configs_dir, *paths)
    text = " ".join(read_page(write_before_after(folder, SUMMARY)).texts)
    said, settings = text.split("All settings")
    assert "/secret" not in said
    assert "eval_path: /secret/b.txt" in settings
    for words in ("model model ", "a.jsonl", "b.txt"):
        assert words in said, words


def test_page_says_what_scores_do_not_measure(
    folder: RunFolder, configs_dir: Path, read_page: ReadPage
) -> None:
    said = (
        "features are untrained",
        "demonstration CLIP",
        "demonstration model",
    )
    store_config(folder, configs_dir)
    text = " ".join(read_page(write_before_after(folder, SUMMARY)).texts)
    assert [words in text for words in said] == [True] * 3
    store_config(
        folder,
        configs_dir,
        *("reward.terms.lpips.pretrained=true", "reward.terms.aesthetic.head=head.pth"),
        *("model.path=other", "reward.combine=normalize_then_sum"),
    )
    text = " ".join(read_page(write_before_after(folder, SUMMARY)).texts)
    assert [words in text for words in said] == [False] * 3
    assert "standardised" in text


def test_page_judges_changes_by_interval_and_weight(
    folder: RunFolder, configs_dir: Path, read_page: ReadPage
) -> None:
    store_config(folder, configs_dir, "reward.terms.lpips.weight=-0.4", "reward.terms.ocr.weight=0")
    page = read_page(write_before_after(folder, SUMMARY))
    start = page.texts.index("Reading") + 1
    assert page.texts[start : start + 31] == [
        # Of weight 0: neither is asked for.
        *("ocr", "0.500", "0.750", "+0.250", "[+0.125, +0.375]", "rose"),
        # It is to fall.
        *("lpips", "0.500", "0.250", "-0.250", "[-0.500, -0.125]", "better"),
        *("ssim", "0.500", "0.562", "+0.062", "[-0.125, +0.250]", "no clear change"),
        # No verdict.
        *("few", "0.500", "0.750", "+0.250", "-", "-"),
        *("total", "0.250", "0.375", "+0.125", "[+0.062, +0.188]", "better"),
        "-: too few prompts for an interval (at least 10).",
    ]


def test_page_without_a_config_says_so_and_shows_the_rest(
    folder: RunFolder, read_page: ReadPage
) -> None:
    page = read_page(write_before_after(folder, SUMMARY))
    text = " ".join(page.texts)
    assert "Cannot read config.yaml: No such file" in text
    assert len(headings(page)) == 3
    # Without weights, what is better is not known.
    assert page.texts[page.texts.index("Reading") + 1 :][5] == "rose"
    assert "All settings" not in text


def test_page_shows_all_settings_and_how_to_reproduce_the_run(
    folder: RunFolder, configs_dir: Path, read_page: ReadPage
) -> None:
    stored = store_config(folder, configs_dir)
    page = read_page(write_before_after(folder, SUMMARY))
    assert page.after("All settings", 1) == [" ".join(stored.split())]
    assert any("glm-grpo train --config-dir again run_dir=again/run" in t for t in page.texts)


@pytest.mark.parametrize(("evaluations", "words"), [(0, "no evaluation"), (1, "one evaluation")])
def test_page_says_that_two_evaluations_are_needed(
    evaluations: int, words: str, tmp_path: Path, configs_dir: Path, read_page: ReadPage
) -> None:
    folder = RunFolder(tmp_path)
    store_config(folder, configs_dir)
    for step in range(evaluations):
        store_evaluation(folder, step, BEFORE)
    page = read_page(write_before_after(folder, ()))
    text = " ".join(page.texts)
    assert words in text
    assert headings(page) == page.all("img") == []
    assert "0.4 lpips + 0.2 ssim" in text


def test_page_says_that_a_table_is_damaged(
    folder: RunFolder, configs_dir: Path, read_page: ReadPage
) -> None:
    store_config(folder, configs_dir)
    path = folder.evaluation_path(10)
    path.write_bytes(path.read_bytes()[:-50])
    text = " ".join(read_page(write_before_after(folder, ())).texts)
    # In place of the table and in place of the images.
    assert text.count(" evaluations/step-000010.parquet is not a complete Parquet file") == 2
    assert "0.4 lpips + 0.2 ssim" in text


def test_page_pairs_only_prompts_of_both_evaluations(tmp_path: Path, read_page: ReadPage) -> None:
    folder = RunFolder(tmp_path)
    store_evaluation(folder, 0, {"a": [0.25], "b": [0.25]})
    store_evaluation(folder, 10, {"b": [0.5], "c": [0.75]})
    assert headings(read_page(write_before_after(folder, ()))) == ["The only prompt: +0.250"]
    store_evaluation(folder, 20, {"c": [0.5]})
    page = read_page(write_before_after(folder, ()))
    assert "The first and the last evaluation have no prompt in common." in page.texts


def test_page_keeps_hostile_text_as_text_and_loads_only_from_the_run(
    folder: RunFolder, read_page: ReadPage
) -> None:
    for step in (0, 10):
        store_evaluation(folder, step, BEFORE, prompt=HOSTILE, texts=[HOSTILE])
    path = write_before_after(folder, SUMMARY)
    page = read_page(path)
    assert page.texts.count(HOSTILE.strip()) == 6
    assert page.all("script") == []
    assert not [key for _, attributes in page.elements for key in attributes if key[:2] == "on"]
    assert not re.search(r"https?:|//\w|@import|url\(|<script|<iframe", path.read_text())
    linked = {str(link) for link in page.linked()}
    assert all(re.match(r"(thumbs/|index\.html$|index\.html#progress\?)", link) for link in linked)
