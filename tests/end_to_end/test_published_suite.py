"""`glm-grpo eval` on rows of published suites.

Those of GenEval on a small Janus-Pro with a function as detector, and those of LongText-Bench on
the embedded GLM-Image with OCR.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from glm_grpo import load_config, load_run, train
from glm_grpo.cli import main
from glm_grpo.tiny.prompts import tiny_prompts
from tests.end_to_end.test_janus_pro import SMALL
from tests.janus_miniature import write_folder

DETECTOR = '''\
from rewards import Detection


def detect(pixels, classes):
    """Each class is as sure as one channel is bright; reddish images show red things."""
    found = []
    for image in pixels:
        red, green, blue = (image.float().mean(dim=(1, 2)) / 255).tolist()
        colours = {"red": red, "blue": blue, "green": green}
        found.append(
            [
                Detection(label, (red, green, blue)[place % 3], 8.0 * place, 2.0, 8.0 * place + 6.0,
                          9.0, colours=colours)
                for place, label in enumerate(classes)
            ]
        )
    return found
'''
SAMPLES = 3
DOG, CAT = ({"class": name, "count": 1} for name in ("dog", "cat"))
ROWS: list[dict[str, Any]] = [
    *(
        {"tag": "single_object", "include": [DOG], "prompt": f"a photo of dog {n}"}
        for n in range(10)
    ),
    *({"tag": "two_object", "include": [DOG, CAT], "prompt": f"dog, cat {n}"} for n in range(2)),
    {
        "tag": "counting",
        "include": [{"class": "cat", "count": 1}],
        "exclude": [{"class": "cat", "count": 2}],
        "prompt": "a photo of one cat",
    },
    {"tag": "colors", "include": [DOG | {"color": "red"}], "prompt": "a photo of a red dog"},
    {"tag": "colors", "include": [DOG | {"color": "blue"}], "prompt": "a photo of a blue dog"},
    {
        "tag": "position",
        "include": [DOG, CAT | {"position": ["right of", 0]}],
        "prompt": "a photo of a cat right of a dog",
    },
    {
        "tag": "color_attr",
        "include": [DOG | {"color": "red"}, CAT | {"color": "blue"}],
        "prompt": "a photo of a red dog and a blue cat",
    },
]
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A config of the small model, with files in a folder of their own."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "find.py").write_text(DETECTOR)
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    model = write_folder(tmp_path_factory.mktemp("model"), paints=True, spread=1.0)
    detector = f"detector: 'find.py:detect', folder: '{folder}', clip_weights: null"
    return [
        *SMALL,
        f"+reward.terms.composition={{weight: 1.0, {detector}}}",
        *(f"model.path={model}", f"data.eval_path={folder / 'rows.jsonl'}"),
        f"eval.samples_per_prompt={SAMPLES}",
    ]


def images_of(folder: Path, step: int) -> pandas.DataFrame:
    """Tag, and whether each stored image is right: its note is empty."""
    table = load_run(folder).evaluation(step)
    tags = table["metadata"].map(lambda row: json.loads(row)["tag"])
    right = (table["note/composition"] == "").astype(float)
    return pandas.DataFrame({"id": table["prompt_id"], "tag": tags, "right": right})


def of_tag(found: dict[str, Any], group: str, score: str = "composition_exact") -> dict[str, Any]:
    (each,) = [
        each
        for each in found["grouped"]["scores"]
        if (each["group"], each["score"]) == (group, score)
    ]
    return each


def assert_as_stored(figures: dict[str, Any], images: pandas.DataFrame) -> None:
    """mean@1 and best@k of some images are those of the stored verdicts."""
    by_prompt = images["right"].to_numpy().reshape(-1, SAMPLES)
    assert figures["mean"]["mean"] == pytest.approx(by_prompt.mean())
    assert figures["best"]["mean"] == pytest.approx((by_prompt.max(axis=1) == 1).mean())


def test_eval_measures_a_base_model_and_then_what_training_gained(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    # The first override takes the place of a run; no training prompts are given.
    main(["eval", "--config-name", "janus_pro_1b_24gb", "--json", *words])
    alone = json.loads(capsys.readouterr().out)
    folder = Path("outputs/eval")
    images = images_of(folder, 0)
    assert len(images) == len(ROWS) * SAMPLES
    for tag in TAGS:
        figures = of_tag(alone, tag)
        assert_as_stored(figures["before"], images[images["tag"] == tag])
        assert figures["after"] is None
    assert_as_stored(of_tag(alone, "all")["before"], images)
    means = [images[images["tag"] == tag]["right"].mean() for tag in TAGS]
    assert 0 < np.mean(means) < 1
    overall = of_tag(alone, "mean of groups")["before"]["mean"]
    assert overall["mean"] == pytest.approx(np.mean(means))
    # Ten prompts of one tag have an interval: that of a bootstrap with other random numbers.
    single = of_tag(alone, "single_object")["before"]["mean"]
    values = images[images["tag"] == "single_object"]["right"].to_numpy().reshape(10, SAMPLES)
    draws = np.random.default_rng(5).integers(0, 10, (20_000, 10))
    ends = np.quantile(values.mean(axis=1)[draws].mean(axis=1), [0.025, 0.975])
    assert [single["low"], single["high"]] == pytest.approx(ends, abs=0.04)
    assert of_tag(alone, "colors")["before"]["mean"]["low"] is None
    assert alone["conditions"]["sampling"] == "temperature 1, no token dropped, guidance 5"
    assert alone["conditions"]["term composition"].startswith("find.py:detect, ")
    page = (folder / "gallery/report.html").read_text()
    assert "Base model" in page
    assert "best@3" in page
    assert '"steps_planned":null' in (folder / "gallery/data/run.js").read_text()

    trained = ("data.path=" + words[-2].partition("=")[2], "train.steps=3", "run_dir=run")
    train(load_config("janus_pro_1b_24gb", *words, *trained))
    page = Path("run/gallery/report.html").read_text()
    assert "composition_exact by tag" in page
    assert "over best@3" in page
    capsys.readouterr()
    main(["eval", "run", "--markdown"])
    result = Path("run/evals/step-000003")
    assert capsys.readouterr().out == (result / "table.md").read_text()
    both = json.loads((result / "table.json").read_text())
    before, after = (images_of(result, step) for step in (0, 3))
    for tag in TAGS:
        figures = of_tag(both, tag)
        # The same seeds give the same images of the base model.
        assert figures["before"] == of_tag(alone, tag)["before"]
        assert_as_stored(figures["after"], after[after["tag"] == tag])
    figures = of_tag(both, "all")
    best = before["right"].to_numpy().reshape(-1, SAMPLES).max(axis=1)
    assert figures["over_best"]["mean"] == pytest.approx(after["right"].mean() - best.mean())
    change = after["right"].mean() - before["right"].mean()
    assert figures["change"]["mean"]["mean"] == pytest.approx(change)
    assert "**composition_exact by tag**" in (result / "table.md").read_text()


def test_eval_reads_the_texts_of_longtext_bench_by_category(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    signs = tiny_prompts("heldout", height=128, width=128)
    rows = [
        {
            "prompt_id": n,
            "prompt": caption,
            "category": "signs" if n < 3 else "slides",
            "length": "short",
            # Slides ask for a second text, which no image has.
            "text": [word] if n < 3 else [word, "AND SOMETHING ELSE"],
        }
        for n, (caption, (word,)) in enumerate(zip(signs.captions(), signs.texts(), strict=True))
    ][:6]
    (tmp_path / "text_prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    words = ("lpips=null", "ssim=null", "aesthetic=null", "eval.group_by=category")
    suite = ("data.eval_path=text_prompts.jsonl", "eval.samples_per_prompt=2")
    main(["eval", "--config-name", "tiny", "--json", *words, *suite])
    found = json.loads(capsys.readouterr().out)
    table = load_run(Path("outputs/eval")).evaluation(0)
    scores = table["raw/ocr"].to_numpy().reshape(6, 2)
    for group, part in (("signs", scores[:3]), ("slides", scores[3:])):
        figures = of_tag(found, group, "ocr")["before"]
        assert figures["mean"]["mean"] == pytest.approx(part.mean())
        assert figures["best"]["mean"] == pytest.approx(part.max(axis=1).mean())
    assert scores[3:].max() < 0.6 < scores[:3].max()
    assert of_tag(found, "slides", "ocr_exact")["before"]["best"]["mean"] == 0
    assert found["conditions"]["term ocr"].startswith("RapidOCR (rapidocr ")
