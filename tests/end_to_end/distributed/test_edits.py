"""Edits on several processes: copies (DDP) and shards (FSDP2) give what one process gives."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

from tests.end_to_end.distributed.conftest import SHARDS, metrics_of

pytestmark = [pytest.mark.timeout(900)]

BRIGHTNESS = """
def score(prompts, pixels):
    return pixels.float().mean(dim=(1, 2, 3)) / 255
"""
EDITS = (
    "data.sources=2",
    "train.eval_every=2",
    "loss.kl_coef=0.1",
    # Products of one row depend on where in memory weights lie: a picture may differ by a level.
    *(f"~reward.terms.{name}" for name in ("ssim", "ocr", "aesthetic")),
    "+reward.terms.own={kind: custom, function: 'brightness:score', weight: 1}",
    "reward.allow_untied=true",
)
ADAPTERS = ("model.adapter={rank: 4, alpha: 8.0}", "optim.learning_rate=2e-3")


@pytest.fixture(scope="module")
def launcher(launcher):
    """With edits of two noisy pictures where the prompts were, and a term that reads no detail."""
    (launcher.folder / "brightness.py").write_text(BRIGHTNESS)
    for name, words in (
        ("train.jsonl", ("UP", "IN", "AT", "BY")),
        ("held_out.jsonl", ("GO", "ON")),
    ):
        rows = []
        for index, word in enumerate(words):
            paths = [f"{word}-{number}.png" for number in range(2)]
            for number, path in enumerate(paths):
                rng = np.random.default_rng((index, number))
                pixels = rng.integers(256, size=(64, 64, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(launcher.folder / path)
            rows.append({"id": word, "prompt": f'write "{word}"', "sources": paths})
        (launcher.folder / name).write_text("\n".join(map(json.dumps, rows)))
    return launcher


def run(launcher, name, *overrides, **how):
    files = (f"data.{key}={launcher.folder / file}" for key, file in PATHS.items())
    return launcher.run(name, *EDITS, *files, *overrides, **how)


PATHS = {"path": "train.jsonl", "eval_path": "held_out.jsonl"}


def assert_same_metrics(run, expected):
    """But for shares of pixels beyond a threshold."""
    for ours, theirs in zip(metrics_of(run), metrics_of(expected), strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            if not name.startswith("canary/"):
                assert ours[name] == pytest.approx(theirs[name], abs=1e-4), name


def source_tokens(run):
    table = pyarrow.parquet.read_table(run / "rollouts" / "step-000002.parquet")
    return table["source_token_ids"].to_pylist()


def test_two_copies_give_the_figures_of_one_process(launcher):
    one = run(launcher, "one", *ADAPTERS, "train.micro_batch_size=6")
    two = run(launcher, "two", *ADAPTERS, processes=2)
    assert_same_metrics(two, one)
    assert source_tokens(two) == source_tokens(one)
    # Sources differ from prompt to prompt, and the policy moved.
    assert len({str(tokens) for tokens in source_tokens(one)}) == 3
    assert metrics_of(one)[-1]["kl/reference"] > 1e-4


def test_shards_give_the_figures_of_one_process(launcher):
    full = ("model.adapter=null", "train.micro_batch_size=1")
    one = run(launcher, "whole", *full)
    shards = run(launcher, "shards", *full, processes=2, env=SHARDS)
    assert_same_metrics(shards, one)
    assert source_tokens(shards) == source_tokens(one)
    assert metrics_of(one)[-1]["kl/reference"] > 1e-5
