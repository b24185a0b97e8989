"""train.py and the commands, as a user calls them, on the embedded model."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import metadata_load
from PIL import Image

from glm_grpo import cli
from glm_grpo.config import from_yaml
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics, read_table
from glm_grpo.tiny.prompts import EXAMPLE_CAPTION

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
        *(
            sys.executable,
            "train.py",
            f"hydra.run.dir={folder / 'out'}",
            f"data.eval_path={held_out}",
        ),
        "train.steps=1",
        *("rollout.prompts_per_step=2", "rollout.group_size=2", "eval.samples_per_prompt=2"),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return folder / "out", ended


def test_train_script_says_what_it_did_in_plain_lines(run):
    folder, ended = run

    first = "loading: model tiny, prompts tiny:train, terms lpips ssim ocr aesthetic"
    assert ended.stdout.splitlines()[0] == first
    assert "self-check passed" in ended.stdout + ended.stderr
    assert "held-out prompts, before and after" in ended.stdout
    assert str(folder / "gallery" / "index.html") in ended.stdout
    look, compare, use = ended.stdout.splitlines()[-3:]
    assert look == f"to look at it:  glm-grpo gallery {folder} --serve"
    assert compare.endswith(f" {folder}")
    assert use == f"to use it:      glm-grpo export {folder} {folder}-export"
    assert "\x1b" not in ended.stdout + ended.stderr
    assert "\r" not in ended.stdout + ended.stderr


def test_train_script_says_which_sizes_it_brought_to_the_run(run):
    folder, ended = run

    note = (
        "settings: train.micro_batch_size 16 works as 4 (the images of a step); "
        "optim.warmup_steps 2 works as 1 (train.steps)"
    )
    assert (ended.stdout + ended.stderr).count(note) == 1
    stored = from_yaml(RunFolder(folder).config_path.read_text())
    assert (stored.train.micro_batch_size, stored.optim.warmup_steps) == (16, 2)
    # The whole warm-up is over with the only update.
    assert read_metrics(RunFolder(folder))[1]["optim/learning_rate"] == stored.optim.learning_rate


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


def test_export_command_writes_a_pipeline_whose_readme_draws_a_picture(run, tmp_path, capsys):
    folder = tmp_path / "pipeline"
    cli.main(["export", str(run[0]), str(folder)])

    assert str(folder / "README.md") in capsys.readouterr().out
    share = read_metrics(RunFolder(run[0]))[-1]["policy/outside_codebook"]
    assert 0 < share < 1e-2
    assert f"Outside the codebook: {share:.1e} of a token's" in (folder / "README.md").read_text()
    (snippet,) = re.findall(
        r"```python\n(.*?)```", (folder / "README.md").read_text(), flags=re.DOTALL
    )
    subprocess.run([sys.executable, "-c", snippet], cwd=folder, check=True)
    card = (folder / "README.md").read_text()
    assert metadata_load(folder / "README.md")["license"] == "apache-2.0"
    # Of the run: its two held-out prompts, which have no target.
    assert "| reward | `weighted_sum` of lpips 0.4, ssim 0.2, ocr 0.3, aesthetic 0.1 |" in card
    assert "| prompts | `tiny:train`, held out: `held_out.jsonl` |" in card
    assert "Mean scores of 2 prompts" in card
    after = read_table(RunFolder(run[0]).evaluation_path(1)).to_pandas().total.mean()
    assert re.search(rf"\| total \| 0\.\d{{3}} \| {after:.3f} \| [+-]0\.\d{{3}} \|", card)
    # As tiny.yaml draws.
    assert Image.open(folder / "picture.png").size == (128, 128)
    assert "num_inference_steps=4," in snippet
    # What the embedded model knows how to draw.
    assert f"    {EXAMPLE_CAPTION!r}," in snippet


def test_export_command_refuses_an_adapter_of_full_fine_tuning_before_anything_is_read(
    run, tmp_path, capsys
):
    # Weights that were read would end it in another way: there are none.
    bare = tmp_path / "run"
    bare.mkdir()
    shutil.copy(run[0] / "config.yaml", bare)
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", str(bare), str(tmp_path / "adapter"), "--format", "adapter"])
    assert ended.value.code == 2
    assert "use --format pipeline" in capsys.readouterr().err


def test_training_goes_on_when_nobody_reads_what_it_prints(tmp_path):
    held_out = tmp_path / "held_out.txt"
    held_out.write_text('a red sign that says "GO"\n')
    settings = (
        *(f"run_dir={tmp_path / 'out'}", f"data.eval_path={held_out}", "trackers=[]"),
        *("train.steps=1", "train.micro_batch_size=4", "optim.warmup_steps=0", "decode.steps=1"),
        *("rollout.prompts_per_step=2", "rollout.group_size=2", "eval.samples_per_prompt=1"),
    )
    ended = subprocess.run(
        [
            *("bash", "-c", '"$@" | head -1; exit ${PIPESTATUS[0]}', "-"),
            *(sys.executable, "train.py", *settings),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.splitlines()) == 1
    assert "standard output takes no more (Broken pipe): the run goes on" in ended.stderr
    assert "Traceback" not in ended.stderr
    folder = RunFolder(tmp_path / "out")
    assert [row["step"] for row in read_metrics(folder)] == [0, 1]
    assert folder.gallery_path.is_file()
    assert folder.checkpoint_dir(1).is_dir()


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
    small = ("rollout.prompts_per_step=2", "rollout.group_size=2")

    cli.main(["check", *small])

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    assert "; train.micro_batch_size 16 works as 4 (the images of a step)" in lines[0]
    assert all(line.startswith("ok  ") for line in lines)
