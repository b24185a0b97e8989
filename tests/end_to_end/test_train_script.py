"""train.py and the commands, as a user calls them, on the embedded model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import metadata_load
from PIL import Image

from glm_grpo import cli
from glm_grpo.commands.model_card import describe_training
from glm_grpo.config import from_yaml
from glm_grpo.models.export_page import LABEL_HEIGHT
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics, read_table

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(programs, tmp_path_factory):
    """One step of training by train.py, in a process of its own; two held-out prompts."""
    folder = tmp_path_factory.mktemp("run")
    held_out = folder / "held_out.jsonl"
    prompts = [
        {"prompt": 'red on white: a circle below the word "KITE"', "id": "kite"},
        {"prompt": 'white on red: a square above the word "ZEN"', "id": "zen"},
    ]
    held_out.write_text("\n".join(json.dumps(prompt) for prompt in prompts))
    ended = programs.run(
        folder,
        str(ROOT / "train.py"),
        *(f"hydra.run.dir={folder / 'out'}", f"data.eval_path={held_out}", "train.steps=1"),
        *("rollout.prompts_per_step=2", "rollout.group_size=2", "eval.samples_per_prompt=2"),
        prepare="tests.small_preview:shrink_preview",
    )
    assert ended.returncode == 0, ended.stderr
    return folder / "out", ended


def test_train_script_says_what_it_did_in_plain_lines(run):
    folder, ended = run

    first = "checking: model tiny, prompts tiny:train, terms lpips ssim ocr aesthetic"
    assert ended.stdout.splitlines()[0] == first
    assert "self-check passed" in ended.stdout + ended.stderr
    assert "held-out prompts, before and after" in ended.stdout
    assert str(folder / "gallery" / "index.html") in ended.stdout
    look, compare, longer, use = ended.stdout.splitlines()[-4:]
    assert look == f"to look at it:  glm-grpo gallery {folder} --serve"
    assert compare.endswith(f" {folder}")
    # The config has a cosine schedule, which ends at the last step.
    assert longer == f"to train more:  start a new run with model.start_from={folder}"
    assert "the learning rate falls to 0 at step 1" in ended.stdout + ended.stderr
    assert use == f"to use it:      glm-grpo export {folder} {folder}-export"
    assert "\x1b" not in ended.stdout + ended.stderr
    assert "\r" not in ended.stdout + ended.stderr


def test_train_script_says_which_sizes_it_brought_to_the_run(run):
    folder, ended = run

    said = ended.stdout + ended.stderr
    assert said.count("train.micro_batch_size: 4 is used instead of 16") == 1
    assert said.count("optim.warmup_steps 2: ") == 1
    stored = from_yaml(RunFolder(folder).config_path.read_text())
    assert (stored.train.micro_batch_size, stored.optim.warmup_steps) == (16, 2)
    # The only update is the first of the two of the warm-up.
    rate = read_metrics(RunFolder(folder))[1]["optim/learning_rate"]
    assert rate == stored.optim.learning_rate / 2


def test_a_finished_run_prints_its_table_without_loading_a_model(run, programs):
    folder, ended = run

    again = programs.run(folder.parent, str(ROOT / "train.py"), f"train.resume={folder}")

    assert again.returncode == 0, again.stderr
    assert "is finished after 1 step. To" in again.stdout + again.stderr
    assert "loaded policy" not in again.stdout + again.stderr
    table = ended.stdout[ended.stdout.rindex("held-out prompts") :]
    assert again.stdout.endswith(table)


def test_train_script_fills_the_run_folder(run):
    folder = RunFolder(run[0])

    assert [row["step"] for row in read_metrics(folder)] == [0, 1]
    assert read_table(folder.rollout_path(1)).num_rows == 4
    assert len(list(folder.image_dir(1).glob("*.png"))) == 4
    assert len(list(folder.evaluation_image_dir(1).glob("*.png"))) == 4
    assert folder.config_path.is_file()
    assert folder.gallery_path.is_file()
    assert (folder.checkpoint_dir(1) / "policy.safetensors").is_file()
    assert list(folder.tensorboard_dir.rglob("events.out.tfevents.*"))


def test_gallery_command_writes_the_page_again(run, capsys, tmp_path):
    page = RunFolder(run[0]).gallery_path
    page.unlink()

    cli.main(["gallery", str(run[0]), "--sheet", str(tmp_path / "sheet.png")])

    assert page.is_file()
    assert (tmp_path / "sheet.png").is_file()
    assert str(page) in capsys.readouterr().out


@pytest.mark.usefixtures("small_preview")
def test_eval_command_keeps_a_gallery_of_other_prompts(run, capsys, caplog, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text('blue on white: a star above the word "MOON"\n')
    cli.main(["eval", str(run[0]), f"data.eval_path={other}"])

    printed = capsys.readouterr().out
    assert "base and step 1" in printed
    assert "too few prompts for an interval" in printed
    folder = RunFolder(run[0] / "evals/step-000001")
    assert f"to look at it:  glm-grpo gallery {folder.path} --serve" in printed
    table = read_table(folder.evaluation_path(1))
    assert set(table["prompt"].to_pylist()) == {other.read_text().strip()}
    # Of colours and a shape of its own.
    assert "1 of 1 held-out prompt is not of the form COLOURS: a SHAPE" in caplog.text
    assert folder.gallery_path.is_file()
    assert folder.image_path(table["image"][0].as_py()).is_file()


def test_export_command_writes_a_pipeline_and_its_page(run, programs, tmp_path, capsys):
    folder = tmp_path / "pipeline"
    cli.main(["export", str(run[0]), str(folder)])

    said = capsys.readouterr().out
    assert str(folder / "README.md") in said
    assert said.startswith(f"{folder}: weights of step 1\n")
    assert said.endswith(f" hf upload YOUR-NAME/pipeline {folder}\n")
    drawn = programs.run(folder, "generate.py")
    assert drawn.returncode == 0, drawn.stderr
    card = (folder / "README.md").read_text()
    assert metadata_load(folder / "README.md")["license"] == "apache-2.0"
    # Of the run: its two held-out prompts, which have no target.
    lpips = "| lpips | 0.4 | LPIPS to the prompt's target image, as 1 - distance. It applied to no"
    assert lpips in card
    assert "| prompts | `tiny:train`, held out: `held_out.jsonl` |" in card
    assert "Mean scores on 2 held-out prompts, none of which is a training prompt, at" in card
    after = read_table(RunFolder(run[0]).evaluation_path(1)).to_pandas().total.mean()
    assert re.search(rf"\| total \| 0\.\d{{3}} \| {after:.3f} \| [+-]0\.\d{{3}} \|", card)
    # As tiny.yaml draws.
    assert Image.open(folder / "image.png").size == (128, LABEL_HEIGHT + 128)
    assert "num_inference_steps=4," in card
    # Usage comes first, long tables last.
    assert re.findall("^## (.*)", card, re.MULTILINE) == [
        "Generate an image",
        "Held-out prompts, before and after",
        *("How it was trained", "Prompts", "Versions", "Mean@1 and best@k"),
    ]
    (prompt,) = re.findall(r"python generate.py '(.*)'\n", card)
    assert prompt in read_table(RunFolder(run[0]).evaluation_path(1))["prompt"].to_pylist()
    assert re.search(
        r"\| cost \| 4 images sampled for training, 0:0\d:\d\d \(h:mm:ss\) on CPU", card
    )
    assert "226 for training, 2 held out." in card
    # As those that the run wrote, for this user's group and others too.
    modes = {path.stat().st_mode for path in folder.rglob("*.safetensors")}
    assert modes == {RunFolder(run[0]).config_path.stat().st_mode}
    assert "](before_after.png)" in card
    assert Image.open(folder / "before_after.png").width > 300


def test_the_page_of_an_export_does_without_images_that_were_removed(run, tmp_path):
    copied = tmp_path / "run"
    shutil.copytree(run[0], copied, ignore=shutil.ignore_patterns("images", "checkpoints"))
    config = from_yaml((copied / "config.yaml").read_text())

    described = describe_training(RunFolder(copied), config, step=1)

    assert described.png_files == {}
    assert "before_after" not in described.results
    assert "Mean scores on 2 held-out prompts" in described.results


@pytest.mark.long
def test_check_command_passes_on_the_tiny_config(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    small = ("rollout.prompts_per_step=2", "rollout.group_size=2")

    cli.main(["check", *small])

    out = capsys.readouterr().out
    assert "train.micro_batch_size: 4 is used instead of 16 (a step has only 4 images)" in out
    *lines, following = out.splitlines()
    assert all(line.startswith(("ok  ", "    ")) for line in lines)
    assert following.startswith("next: glm-grpo train")
    assert "ok  self-check: full grids" in out
