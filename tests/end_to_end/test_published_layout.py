"""The commands on a folder with the files of the published model, scaled down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from diffusers import GlmImagePipeline
from PIL import Image

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics, read_table
from tests.published_layout import write_published_layout

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]

SMALL = (
    "model.dtype=float32",
    "model.adapter.rank=4",
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.height=128",
    "rollout.width=128",
    "decode.steps=2",
    "decode.rollout_steps=1",
    "eval.samples_per_prompt=1",
    "trackers=[]",
    # Networks whose weights must be fetched.
    "reward.terms.lpips=null",
    "reward.terms.aesthetic=null",
    "reward.terms.ocr=null",
)


@pytest.fixture(scope="module")
def model(assets_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "published"
    write_published_layout(assets_dir / "glm_image_published", folder)
    return folder


@pytest.fixture
def prompts(request, tmp_path):
    """Two prompts of unequal length, which the tokenizer pads with image-end tokens."""
    Image.effect_noise((128, 128), 60).convert("RGB").save(tmp_path / "before.png")
    Image.effect_noise((128, 128), 90).convert("RGB").save(tmp_path / "after.png")
    images = {"target": "after.png"}
    if request.param == "edit_":
        images["source"] = "before.png"
    captions = ('a "KITE"', 'a rather longer prompt, with the word "MOON" in it')
    rows = [json.dumps({"prompt": caption, **images}) for caption in captions]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    config = f"glm_image_{request.param}80gb"
    data = tmp_path / "prompts.jsonl"
    return ("--config-name", config, f"data.path={data}", f"data.eval_path={data}")


@pytest.mark.parametrize("prompts", ["", "edit_"], ids=["images", "edits"], indirect=True)
def test_published_layout_is_checked_trained_and_exported(model, prompts, programs, tmp_path):
    run = tmp_path / "run"
    settings = (*prompts, f"model.path={model}", *SMALL)
    if "glm_image_edit_80gb" in prompts:
        settings += ("reward.terms.clip_image=null",)

    def call(*arguments):
        ended = programs.run(tmp_path, *arguments, prepare="tests.small_preview:shrink_preview")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    said = call("-m", "glm_grpo", "check", *settings)
    assert "self-check: full grids, replay gap" in said

    call(str(ROOT / "train.py"), *settings, f"run_dir={run}", "train.steps=1")
    _, row = read_metrics(RunFolder(run))
    assert row["policy/replay_gap"] < 1e-5
    captions = set(read_table(RunFolder(run).rollout_path(1)).column("prompt").to_pylist())
    assert len(captions) == 2

    call("-m", "glm_grpo", "export", str(run), str(tmp_path / "out"), "--format", "pipeline")
    exported = GlmImagePipeline.from_pretrained(tmp_path / "out")
    assert exported.processor.tokenizer.pad_token_id == 513
    sampling = exported.vision_language_encoder.generation_config
    # Of the run; the base has 0.9 and 0.75.
    assert (sampling.temperature, sampling.top_p) == (1.0, 1.0)
