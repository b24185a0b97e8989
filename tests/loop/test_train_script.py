"""train.py and the commands, as a user calls them, on the embedded model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from diffusers import GlmImagePipeline

from glm_grpo import cli
from glm_grpo.storage import RunFolder
from glm_grpo.tables import read_metrics, read_table

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One step of training by train.py, in a process of its own; two held-out prompts."""
    folder = tmp_path_factory.mktemp("run")
    held_out = folder / "held_out.jsonl"
    prompts = [
        {"prompt": 'red on white: a circle below the word "KITE"', "id": "kite"},
        {"prompt": 'white on red: a square above the word "ZEN"', "id": "zen"},
    ]
    held_out.write_text("\n".join(json.dumps(prompt) for prompt in prompts))
    command = [
        *(sys.executable, "train.py", f"run_dir={folder / 'out'}", f"data.eval_path={held_out}"),
        *("train.steps=1", "train.micro_batch_size=4", "optim.warmup_steps=0"),
        *("rollout.prompts_per_step=2", "rollout.group_size=2", "eval.samples_per_prompt=2"),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return folder / "out", ended


def test_train_script_says_what_it_did_in_plain_lines(run):
    folder, ended = run

    assert "self-check passed" in ended.stdout + ended.stderr
    assert "held-out prompts, before and after" in ended.stdout
    assert str(folder / "gallery" / "index.html") in ended.stdout
    assert "\x1b" not in ended.stdout + ended.stderr
    assert "\r" not in ended.stdout + ended.stderr


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


def test_terms_without_a_target_are_masked_for_that_prompt(run):
    table = read_table(RunFolder(run[0]).evaluation_path(1))

    assert table["raw/lpips"].null_count == 4
    assert table["raw/ssim"].null_count == 4
    assert table["raw/ocr"].null_count == 0


def test_gallery_command_writes_the_page_again(run, capsys, tmp_path):
    page = RunFolder(run[0]).gallery_path
    page.unlink()

    cli.main(["gallery", str(run[0]), "--sheet", str(tmp_path / "sheet.png")])

    assert page.is_file()
    assert (tmp_path / "sheet.png").is_file()
    assert str(page) in capsys.readouterr().out


def test_eval_command_compares_with_the_untrained_model(run, capsys):
    cli.main(["eval", str(run[0])])

    printed = capsys.readouterr().out
    assert "untrained and at step 1" in printed
    assert "total" in printed


def test_export_command_writes_a_pipeline_stock_diffusers_loads(run, tmp_path):
    cli.main(["export", str(run[0]), str(tmp_path / "pipeline")])

    loaded = GlmImagePipeline.from_pretrained(tmp_path / "pipeline")
    assert type(loaded.transformer).__name__ == "GlmImageTransformer2DModel"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["gallery", "nowhere"], 2),
        (["eval", "nowhere"], 2),
        (["export", "nowhere", "new"], 2),
        (["check", "train.step=3"], 2),
        (["check", "model.path=/nowhere/at/all"], 1),
    ],
)
def test_commands_end_with_a_message_and_no_traceback(arguments, code, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)

    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)

    assert ended.value.code == code
    printed = capsys.readouterr().err
    assert "Error: " in printed
    assert "Traceback" not in printed


def test_check_command_passes_on_the_tiny_config(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    small = ("rollout.prompts_per_step=2", "rollout.group_size=2", "train.micro_batch_size=4")

    cli.main(["check", *small])

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert all(line.startswith("ok  ") for line in lines)
