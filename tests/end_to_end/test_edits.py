"""A run on prompts with source images."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from PIL import Image

from glm_grpo.config import compose_config
from glm_grpo.errors import ConfigError
from glm_grpo.run.config import read_config
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics, read_table
from glm_grpo.setup.prepared_run import prepare
from glm_grpo.studio.compare.comparison import compare
from glm_grpo.studio.probe.figures import report_probe
from glm_grpo.studio.probe.page import write_probe
from glm_grpo.studio.probe.probe import sample_probe
from glm_grpo.tiny import world
from glm_grpo.training.batches import build_batch
from glm_grpo.training.generate import encode_sources, sample
from rewards.weighting import combine
from tests.end_to_end.conftest import CONFIG_DIR, SMALL

SIDE = 64
"""Of the images of a run, pixels."""

SETTINGS = (
    "data.sources=1",
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "train.micro_batch_size=2",
    "train.steps=2",
    "train.eval_every=2",
    "train.checkpoint_every=1",
    "eval.samples_per_prompt=1",
    # The adapter moves: the order of sampling and learning is not hidden by a rate of zero.
    "optim.learning_rate=1e-3",
)


def save(path, pixels):
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(path)


@pytest.fixture
def edits(tmp_path):
    """A file of three edits: another word on a sign."""
    rows = []
    for before, after in zip(
        world.signs_of_words(("KITE", "MOON", "LAMP"), seed=3),
        world.signs_of_words(("OPEN", "SALE", "EXIT"), seed=3),
        strict=True,
    ):
        name = before.word.lower()
        save(tmp_path / f"{name}.png", world.draw_sign(before))
        save(tmp_path / f"{name}-after.png", world.draw_sign(after))
        rows.append(
            {
                "id": name,
                "prompt": f'write "{after.word}" instead',
                "source": f"{name}.png",
                "target": f"{name}-after.png",
            }
        )
    path = tmp_path / "edits.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_an_edit_run_stores_its_sources_and_compare_and_probe_show_them(
    make_trainer, edits, tmp_path
):
    paths = (f"data.path={edits}", f"data.eval_path={edits}")
    trainer, models, run_dir = make_trainer(*SETTINGS, *paths, held_out=None)
    trainer.run()
    folder = RunFolder(run_dir)

    table = read_table(folder.rollout_path(1))
    # The target grid alone: an edit has no preview.
    assert {len(ids) for ids in table["token_ids"].to_pylist()} == {4}
    assert {len(ids) for ids in table["source_token_ids"].to_pylist()} == {4}
    ids = table["prompt_id"].to_pylist()
    assert table["sources"].to_pylist() == [[f"images/train-sources/{name}-0.png"] for name in ids]
    for (path,), read in zip(
        table["sources"].to_pylist(), table["source_token_ids"].to_pylist(), strict=True
    ):
        stored = Image.open(folder.path / path)
        pixels = torch.frombuffer(bytearray(stored.tobytes()), dtype=torch.uint8)
        pixels = pixels.view(1, SIDE, SIDE, 3).permute(0, 3, 1, 2).contiguous()
        assert read == models.policy.tokenize_images(pixels, num_sources=1)[0].tolist()
    assert "sources" in read_table(folder.evaluation_path(2)).column_names
    last = read_metrics(folder)[-1]
    assert last["ratio/mean"] == pytest.approx(1.0, abs=1e-4)
    assert "canary/source_copies" in last

    other = RunFolder(shutil.copytree(folder.path, tmp_path / "other"))
    assert compare([folder.path, other.path], weights=None).runs[1].over_first is not None

    config = read_config(folder)
    batch = build_batch(config, prepare(config).prompts.training, 1)
    samples = sample_probe(models, [batch], config, noises=2)
    report = report_probe(samples, config)
    sources = torch.stack([prompt.sources[0] for prompt in batch.prompts])
    table = models.scorer.score(batch.prompts, sources[:, None])
    assert report.copy_total == pytest.approx(combine(table, mode="weighted_sum").mean().item())
    assert [term.copied_source for term in report.terms] == pytest.approx(
        table.raw.mean(dim=(0, 1)).tolist(), nan_ok=True
    )
    reward = config.reward.model_copy(update={"combine": "normalize_then_sum"})
    relative = report_probe(samples, config.model_copy(update={"reward": reward}))
    assert math.isnan(relative.copy_total)
    page = write_probe(report, samples, tmp_path / "probe").read_text()
    assert 'alt="source: ' in page

    first = read_table(folder.evaluation_path(2))["prompt_id"][0].as_py()
    save(
        other.image_path(f"images/sources/{first}-0.png"),
        torch.zeros(3, SIDE, SIDE, dtype=torch.uint8),
    )
    with pytest.raises(ConfigError, match="is not the same image as"):
        compare([folder.path, other.path], weights=None)


def test_a_size_that_the_processor_would_change_is_refused_before_the_model_is_loaded(edits):
    overrides = ["data.sources=1", f"data.path={edits}", f"data.eval_path={edits}"]
    sides = ["rollout.height=32", "rollout.width=32"]
    config = compose_config(CONFIG_DIR, "tiny", [*overrides, *sides])
    with pytest.raises(ConfigError, match="makes 4 tokens instead of 1"):
        prepare(config)
    assert RunFolder(edits.parent / "run").path.exists() is False


@pytest.mark.gpu
def test_the_vision_tower_is_on_the_accelerator_while_sources_are_read(edits):
    paths = (f"data.path={edits}", f"data.eval_path={edits}")
    config = compose_config(CONFIG_DIR, "tiny", [*SMALL, *SETTINGS, *paths, "offload=modules"])
    models = prepare(config).load()
    batch = build_batch(config, prepare(config).prompts.training, 1)
    places = []
    (tower, _) = models.policy.source_modules()
    tower.register_forward_pre_hook(lambda *_: places.append(next(tower.parameters()).device.type))

    encoded = encode_sources(models, batch)
    sample(models, encoded)

    assert set(places) == {"cuda"}
    # Sampling has sent it back.
    assert next(tower.parameters()).device.type == "cpu"
    assert torch.equal(
        models.policy.encode_sources(batch).source_token_ids, encoded.source_token_ids
    )
