"""The Python API, as its docstrings and the notebook show it; both train two steps."""

from __future__ import annotations

import doctest
import json
import logging
from pathlib import Path

import pytest
import torch
from PIL import ExifTags, Image

import glm_grpo
import rewards
from glm_grpo.errors import CheckpointError, ConfigError, StorageError
from glm_grpo.tiny import prompts as tiny_prompts
from rewards import score_images
from rewards.types import Prompt, RewardError

ROOT = Path(__file__).parents[2]
SCORING = {
    "terms": {"ocr": {"weight": 0.6, "engine": "rapidocr"}, "ssim": {"weight": 0.4}},
    "combine": "normalize_then_sum",
}


@pytest.fixture(autouse=True)
def log_is_not_configured() -> None:
    """As in a program of a user's own; a command that another test ran has configured it."""
    logging.getLogger("glm_grpo").setLevel(logging.NOTSET)


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Three held-out prompts of 41, and a small preview."""
    with pytest.MonkeyPatch.context() as patch:
        words, seed = tiny_prompts._SETS["heldout"]
        patch.setitem(tiny_prompts._SETS, "heldout", (words[:3], seed))
        patch.setattr("glm_grpo.models.glm_image.token_grid._PREVIEW_SIDE", 2)
        yield


def run_examples(function):
    """Each is whole: nothing of one is at hand in the next but what it left on the disk."""
    names = {}
    examples = doctest.DocTestParser().get_examples(function.__doc__)
    assert any(example.want for example in examples), function.__name__
    for example in examples:
        if example.want:
            assert repr(eval(example.source, names)) == example.want.rstrip(), example.source
        else:
            exec(example.source, names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds `my-run`, as the example of `train` makes it."""
    folder = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_examples(glm_grpo.train)
    return folder


@pytest.mark.parametrize(
    "function",
    [
        glm_grpo.load_config,
        glm_grpo.load_run,
        glm_grpo.rescore,
        glm_grpo.evaluate,
        rewards.score_images,
    ],
    ids=lambda function: function.__name__,
)
def test_the_example_of_a_docstring_is_true(function, folder, monkeypatch):
    monkeypatch.chdir(folder)

    run_examples(function)


def test_a_run_gives_its_tables(folder):
    run = glm_grpo.load_run(folder / "my-run")

    assert run.config.train.steps == 2
    assert "\ntrain:\n" in str(run.config)
    assert run.metrics.index.tolist() == [0, 1, 2]
    assert run.metrics.loc[1, "reward/mean"] == pytest.approx(run.rollout(1).total.mean())
    summary, last = run.summary(), run.evaluation(2)
    assert summary.loc["ocr", "after"] == pytest.approx(last["raw/ocr"].mean())
    # Three prompts are too few for an interval.
    assert summary.low.isna().all()
    assert run.image(last.target.iloc[0]).size == (128, 128)
    assert run.gallery.is_file()
    assert repr(run) == f"Run({str(run.path)!r}, 2 steps, 2 evaluations)"
    assert "<th>aesthetic</th>" in run._repr_html_()
    rescoring = glm_grpo.rescore(run)
    assert repr(rescoring) == "Rescoring(16 images, 0 of 4 groups change their winner)"
    assert "<th>aesthetic</th>" in rescoring._repr_html_()
    with pytest.raises(CheckpointError, match="contains no run"):
        glm_grpo.load_run(folder)
    with pytest.raises(StorageError, match="step 9 .*1 to 2"):
        run.rollout(9)
    with pytest.raises(StorageError, match="step 1 .*0, 2"):
        run.evaluation(1)
    with pytest.raises(StorageError, match="'1'"):
        run.rollout("1")
    with pytest.raises(StorageError, match=r'not Series; write run\.image\(row\["image"\]\)$'):
        run.image(run.rollout(1).iloc[0])


def test_evaluate_draws_as_a_run_with_these_settings_does(folder, capsys):
    otherwise = ("rollout.temperature=0.5", "rollout.min_p=0.1", "decode.steps=2")
    small = ("train.steps=1", "rollout.prompts_per_step=1", "rollout.group_size=2", "trackers=[]")
    sizes = ("train.micro_batch_size=2", "eval.samples_per_prompt=1")
    config = glm_grpo.load_config("tiny", *small, *sizes, *otherwise, f"run_dir={folder / 'other'}")
    bright = lambda prompts, pixels: pixels.float().mean(dim=(1, 2, 3)) / 255  # noqa: E731
    run = glm_grpo.train(config, rewards={"bright": bright})
    assert "step 1/1  reward" in capsys.readouterr().out

    found = glm_grpo.evaluate(folder / "my-run", *otherwise, "eval.samples_per_prompt=1")

    trained = run.summary().before.to_dict()
    assert 0 < trained.pop("bright") < 1
    assert trained.pop("total") != found.before.total
    assert found.before.drop("total").to_dict() == pytest.approx(trained, abs=1e-6)
    as_trained = glm_grpo.load_run(folder / "my-run").summary()
    assert found.before["total"] != as_trained.before["total"]
    assert found.after["total"] != as_trained.after["total"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=3", "train.steps = 3.*not a key that eval can change.*remedy: leave it out"),
        ("rollout.minp=0.1", "rollout.minp = 0.1.*remedy: did you mean rollout.min_p"),
        ("decode.steps", "missing EQUAL"),
    ],
)
def test_evaluate_refuses_what_is_no_matter_of_drawing(folder, override, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        glm_grpo.evaluate(folder / "my-run", override)


@pytest.mark.long
def test_the_notebook_trains_two_steps_and_looks_at_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples" / "first_run.ipynb").read_text(encoding="utf-8"))
    names = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)

    assert names["run"].steps == [1, 2]
    assert names["row"].size == (4 * 128, 128)
    assert "of 8 groups change their winner" in capsys.readouterr().out


def test_score_images_weighs_only_what_applies(tmp_path):
    white = Image.new("RGB", (96, 64), "white")
    white.save(tmp_path / "white.png")
    prompts = ["a sign", 'a sign that says "GO"', Prompt("mine", "a sign", texts=("GO",))]
    scores = score_images(
        prompts,
        [white, tmp_path / "white.png", str(tmp_path / "white.png")],
        SCORING,
        targets=[None, Image.new("RGB", (32, 32), "white"), None],
    )

    assert scores.ocr.isna().tolist() == [True, False, False]
    assert scores.ssim.isna().tolist() == [True, False, True]
    # Of an image that nothing applies to there is no total; a term that does not apply leaves its
    # weight to the others.
    assert scores.total.isna().tolist() == [True, False, False]
    assert scores.total.tolist()[1:] == pytest.approx([0.4, 0.0])


def test_a_image_in_memory_scores_as_its_file_does(tmp_path):
    rgba = Image.new("RGBA", (64, 32), (255, 255, 255, 0))
    rgba.paste((0, 0, 0, 255), (0, 0, 32, 32))
    rgba.save(tmp_path / "clear.png")
    turned = Image.new("RGB", (64, 32), "white")
    turned.paste("black", (0, 0, 32, 32))
    exif = turned.getexif()
    exif[ExifTags.Base.Orientation] = 6
    turned.save(tmp_path / "turned.png", exif=exif)
    names = ("clear.png", "turned.png")
    target = turned.copy()
    scores = score_images(
        ["a sign"] * 4,
        [*(Image.open(tmp_path / name) for name in names), *(tmp_path / name for name in names)],
        {"terms": {"psnr": {"weight": 1.0}}},
        targets=[target, target] * 2,
    )
    assert scores.psnr[:2].tolist() == scores.psnr[2:].tolist()
    assert scores.psnr[0] == 1
    assert scores.psnr[1] < 1


def test_score_images_fits_a_target_as_a_run_does() -> None:
    # The run cuts what overhangs: of twice the width, a quarter on each side.
    wide = Image.new("RGB", (64, 32), "black")
    wide.paste("white", (16, 0, 48, 32))
    scores = score_images(
        ["a sign"],
        [Image.new("RGB", (32, 32), "white")],
        {"terms": {"psnr": {"weight": 1.0}}},
        targets=[wide],
    )
    assert scores.psnr.tolist() == [1.0]


WHITE = Image.new("RGB", (32, 32), "white")


@pytest.mark.parametrize(
    ("prompts", "images", "config", "message"),
    [
        (["a", "b"], [WHITE], SCORING, "2 prompts, 1 images, 1 targets"),
        ("a", [WHITE], SCORING, "give lists"),
        (["a"], ["no.png"], SCORING, "No such file.*no.png"),
        (["a"], [__file__], SCORING, "test_python_api.py cannot be used"),
        (["a"], [WHITE], {"ocr": 1}, "ocr = 1"),
        (["a"], [WHITE], None, "terms .not given."),
    ],
)
def test_score_images_refuses_other_forms(prompts, images, config, message) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        score_images(prompts, images, config)


def test_score_images_warns_of_terms_that_apply_to_nothing() -> None:
    with pytest.warns(UserWarning, match="none of the images: it needs") as warned:
        scores = score_images(["a"], [WHITE], SCORING)
    assert scores.isna().all(axis=None)
    assert [str(each.message).split()[0] for each in warned] == ["ssim", "ocr"]


def test_score_images_gives_no_total_to_an_image_that_a_term_refuses() -> None:
    def faces(prompts, pixels):
        return [1.0 if pixel.max() > 0 else None for pixel in pixels]

    black = Image.new("RGB", (32, 32), "black")
    with pytest.warns(
        UserWarning, match=r"^faces refused images\[1\]: prompt 1, image 0$"
    ) as warned:
        scores = score_images(["a", "b"], [WHITE, black], rewards={"faces": faces})
    assert scores.faces.isna().tolist() == scores.total.isna().tolist() == [False, True]
    assert len(warned) == 1


def test_score_images_warns_of_targets_that_hardly_fit() -> None:
    targets = [WHITE, Image.new("RGB", (96, 32))]
    with pytest.warns(UserWarning, match=r"targets\[1\] hardly fits .*33 % of it is left"):
        score_images(["a"] * 2, [WHITE] * 2, {"terms": {"psnr": {"weight": 1.0}}}, targets=targets)


def test_a_function_replaces_a_term_and_none_leaves_one_out() -> None:
    half = lambda prompts, pixels: torch.full((len(prompts),), 0.5)  # noqa: E731
    scores = score_images(["a"], [WHITE], SCORING, rewards={"ocr": half, "ssim": None})
    assert scores.to_dict("list") == {"ocr": [0.5], "total": [pytest.approx(0.3)]}
    with pytest.raises(RewardError, match=r"'sim': None}: .* no such term .*\(ocr, ssim\)"):
        score_images(["a"], [WHITE], SCORING, rewards={"sim": None})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: glm_grpo.train("tiny"), r"'tiny' is not a config; write train\(load_config"),
        (lambda: glm_grpo.load_config("train.steps=2"), "'train.steps=2' is an override"),
        (lambda: glm_grpo.load_config("configs/tiny.yaml"), r"load_config\(config_dir='configs'\)"),
        (lambda: glm_grpo.load_config("tiny", ["ocr=0"]), r"\['ocr=0'\]: each override must be"),
    ],
)
def test_keys_in_another_form_are_refused(call, message) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_score_images_says_what_to_write_instead_of_what_it_refuses() -> None:
    config = {"terms": {"ssim": {"wieght": 1.0}}, "combin": "weighted_sum"}
    with pytest.raises(ValueError, match="^The config has 2 problems:") as caught:
        score_images([], [], config)
    assert str(caught.value).splitlines()[1:] == [
        "  terms.ssim.wieght = 1.0",
        "    rule:   is not an option of kind ssim",
        "    remedy: did you mean weight?",
        "  combin = 'weighted_sum'",
        "    rule:   is not a key of the config",
        "    remedy: did you mean combine?",
    ]
