"""Whole runs of a Janus-Pro whose tokens draw colours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from glm_grpo import load_config, train
from glm_grpo.api import Run
from tests.end_to_end.distributed.conftest import SHARDS, assert_same_metrics
from tests.end_to_end.runs import read_record
from tests.janus_miniature import write_folder

COLOURS = ("red", "green", "blue")
"""Of target images, and named in prompts."""

SMALL = (
    *("rollout.height=32", "rollout.width=32", "rollout.prompts_per_step=3"),
    *("model.dtype=float32", "model.adapter={rank: 4, alpha: 8.0}", "trackers=[]"),
    *("~reward.terms.pick_score", "~reward.terms.clip_score", "reward.combine=weighted_sum"),
    *("reward.allow_image_only=true", "optim.learning_rate=3e-3", "optim.warmup_steps=0"),
    *("train.checkpoint_every=1", "train.eval_every=4", "train.keep_checkpoints=9"),
    *("train.micro_batch_size=12", "loss.kl_coef=0.001"),
)

TERM = "+reward.terms.red={kind: custom, weight: 1.0, function: 'janus_colours:score'}"

PROGRAM = '''\
import torch
from rewards import Scores


def score(prompts, pixels):
    """Red, less the mean of green and blue; what each place earned."""
    red, green, blue = (pixels.float() / 255).unbind(1)
    places = torch.nn.functional.avg_pool2d((red - (green + blue) / 2)[:, None], 8)[:, 0]
    return Scores(places.mean(dim=(1, 2)), score_map=places / places[0].numel())
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"), paints=True, spread=1.0)


@pytest.fixture
def settings(model, tmp_path, monkeypatch):
    """Overrides of a run in an own folder, with prompts that name a colour."""
    (tmp_path / "janus_colours.py").write_text(PROGRAM)
    (tmp_path / "prompts.txt").write_text("".join(f"a {each} sheet\n" for each in COLOURS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    data = ("data.path=prompts.txt", "data.eval_path=prompts.txt", f"model.path={model}")
    return (*data, *SMALL)


def run(settings, folder, *overrides) -> Run:
    words = (*settings, TERM, *overrides, f"run_dir={folder}")
    return train(load_config("janus_pro_1b_24gb", *words))


@pytest.mark.parametrize(("sign", "credit"), [(1, "image"), (-1, "image"), (1, "place")])
def test_it_learns_and_follows_the_sign_of_the_reward(settings, sign, credit):
    found = run(settings, "run", "train.steps=10", f"red={sign}.0", f"advantage.credit={credit}")
    change = found.metrics["reward/red/mean"].iloc[-1] - found.metrics["reward/red/mean"].iloc[1]
    assert sign * change > 0.2


def test_a_run_that_is_resumed_ends_as_an_uninterrupted_one(settings, tmp_path):
    more = ("train.minibatches=3", "eval.ema_decay=0.5", "rollout.batch_size=8")
    run(settings, "whole", *more, "train.steps=4", "train.eval_every=2")
    run(settings, "parts", *more, "train.steps=2", "train.eval_every=2")
    run(settings, "parts", *more, "train.steps=4", "train.eval_every=2", "train.resume=auto")
    assert read_record(tmp_path / "parts") == read_record(tmp_path / "whole")


def test_images_sampled_in_parts_are_those_sampled_at_once(settings):
    at_once, parts = (
        run(settings, name, "train.steps=1", *more).rollout(1)
        for name, more in (("one", ()), ("parts", ("rollout.batch_size=8",)))
    )
    assert at_once["token_ids"].map(list).tolist() == parts["token_ids"].map(list).tolist()
    for own, other in zip(at_once["log_probs"], parts["log_probs"], strict=True):
        assert own == pytest.approx(other, abs=1e-4)


def test_target_images_are_learned(settings, tmp_path):
    rows = []
    for number, colour in enumerate(COLOURS):
        level = [255 * (place == number) for place in range(3)]
        Image.new("RGB", (32, 32), tuple(level)).save(tmp_path / f"{colour}.png")
        rows.append({"prompt": f"a {colour} sheet", "target": f"{colour}.png"})
    (tmp_path / "targets.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    more = ("train.method=sft", "data.path=targets.jsonl", "train.steps=6")
    metrics = run(settings, "run", *more).metrics
    assert metrics["sft/cross_entropy"].iloc[-1] < 0.7 * metrics["sft/cross_entropy"].iloc[1]


@pytest.mark.timeout(900)
def test_two_processes_with_shards_give_what_one_gives(settings, programs, tmp_path, configs_dir):
    words = [
        *("--config-name", "janus_pro_1b_24gb", *settings, TERM, "model.adapter=null"),
        *("train.steps=2", "train.eval_every=2", "optim.epsilon=1e-3", "optim.learning_rate=1e-3"),
        "train.micro_batch_size=1",
    ]
    script = str(configs_dir.parent / "train.py")
    for folder, count in (("one", 1), ("two", 2)):
        started = programs.start_team(
            count, tmp_path, script, *words, f"run_dir={folder}", env=SHARDS if count > 1 else None
        )
        assert [each.wait(400.0) for each in started] == [0] * count, started[0].said()
    assert_same_metrics(tmp_path / "two", tmp_path / "one")
