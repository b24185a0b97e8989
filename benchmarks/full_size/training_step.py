"""Sections: time whole training steps with reward networks, records and checkpoints."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from jaxtyping import Float32, UInt8
from PIL import Image
from rich.console import Console
from torch import Tensor

from benchmarks.full_size.learning import make_optimizer
from benchmarks.full_size.scale import Bench, Rows, caption, make_batch
from glm_grpo.config import Config
from glm_grpo.data.prompts import load_prompts
from glm_grpo.grpo.update import Learner, update_policy
from glm_grpo.models.find import find_model
from glm_grpo.models.glm_image.policy import GlmImagePolicy
from glm_grpo.models.planning import MemoryPlan
from glm_grpo.plan.floors import step_floors
from glm_grpo.run.lock import RunLock
from glm_grpo.run.resume import make_run_folder
from glm_grpo.run.tables import read_metrics
from glm_grpo.setup.loading import place_models
from glm_grpo.setup.prepared_run import PreparedRun
from glm_grpo.setup.prompts import Prompts
from glm_grpo.setup.trainer import build_trainer
from glm_grpo.studio.gallery import refresh_gallery
from glm_grpo.training.collect import collect
from glm_grpo.training.distributed.processes import Processes
from glm_grpo.training.models import Models
from glm_grpo.training.phases import PhaseClock
from glm_grpo.types import PromptBatch
from rewards.types import Prompt

_PACKAGES = {"lpips": "lpips", "ocr": "rapidocr", "clip_image": "open_clip"}
"""Package of each term. A term whose package is missing is left out, and the row lists the rest."""

_PROMPT_TOKENS = 64
"""Roughly the number of tokens of the captions."""

_NOTHING_MOVED = MemoryPlan(
    (), (), is_on_accelerator=True, overhead=0, cpu_at_start=0, moved_in=0, moved_out=0
)
"""All models stay on the card. Planning would take seconds, and works on any machine."""

_TINY_CLIP = "pkg://glm_grpo/tiny/weights/quality_clip/config.json"


def whole_steps(bench: Bench) -> Rows:
    """Run two steps like a run does, with records, gallery and a checkpoint after each."""
    yield "two steps of a run", partial(_run, bench)


def large_steps(bench: Bench) -> Rows:
    """Run two steps with the shipped settings, and two on edits."""
    yield "shipped settings", partial(_shipped_step, bench)
    yield "edits", partial(_edit_step, bench)


def flat_rewards(bench: Bench) -> Rows:
    """Check that a constant reward, which teaches nothing, leaves the weights bitwise unchanged."""
    yield "constant reward", partial(_constant_reward, bench)


def constant_score(
    prompts: list[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
) -> Float32[Tensor, " N"]:
    """Score all images equally."""
    del prompts
    return torch.full((len(pixels),), 0.25)


def _run(bench: Bench) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        config = bench.config(
            *_reward(bench),
            # Half of the config's 20, like the config's rollouts, but without rechecks.
            "decode.steps=10",
            "decode.rollout_steps=null",
            "train.steps=2",
            "train.checkpoint_every=1",
            "train.eval_every=1000",
            "optim.warmup_steps=0",
            f"run_dir={place / 'run'}",
        )
        models = _place(bench, config)
        trainer = build_trainer(
            _prepared(bench, config, _prompts(bench, place)),
            models,
            make_run_folder(config, RunLock()),
            Console(quiet=True),
            show=refresh_gallery,
        )
        begun: list[float] = []
        take = trainer.step.take

        def noted(*arguments: Any, **options: Any) -> Any:
            begun.append(time.perf_counter())
            return take(*arguments, **options)

        trainer.step.take = noted  # type: ignore[method-assign]
        trainer.run()
        rows = read_metrics(trainer.step.records.folder)
        begun.append(time.perf_counter() - float(rows[-1]["time/evaluation"] or 0))
    walls = [end - start for start, end in pairwise(begun)]
    steps = [_of_step(row, wall) for row, wall in zip(rows[1:], walls, strict=True)]
    return {
        "images": config.rollout.prompts_per_step * config.rollout.group_size,
        "side": config.rollout.height,
        "denoising_steps": config.decode.training_steps,
        "terms": [*config.reward.terms],
        "floors": _floors(bench, config),
        "steps": steps,
    }


def _of_step(row: Any, wall: float) -> dict[str, Any]:
    """Seconds by phase, and the wall-clock time between the phases."""
    times = {
        name.removeprefix("time/"): value
        for name, value in row.items()
        if name.startswith("time/") and name not in ("time/step", "time/evaluation")
    }
    return {
        **{f"{name}_seconds": value for name, value in times.items()},
        **{name: value for name, value in row.items() if name.startswith("perf/mfu/")},
        "wall_seconds": wall,
        "idle_share": 1 - sum(times.values()) / wall,
        "peak_bytes": row["memory/peak_bytes"],
    }


def _shipped_step(bench: Bench) -> dict[str, Any]:
    shipped = bench.scale.shipped or (
        "rollout.height=1024",
        "rollout.width=1024",
        "rollout.prompts_per_step=4",
    )
    config = bench.config(*_reward(bench), *shipped)
    return _one_step(bench, config)


def _edit_step(bench: Bench) -> dict[str, Any]:
    overrides = bench.scale.shipped or (
        "rollout.height=1024",
        "rollout.width=1024",
        "rollout.prompts_per_step=1",
        "decode.rollout_steps=2",
    )
    config = bench.config(*_reward(bench), *overrides, name="glm_image_edit_80gb")
    return _one_step(bench, config)


def _one_step(bench: Bench, config: Config) -> dict[str, Any]:
    """Collect and learn from one prompt, which compiles and selects kernels, then from all."""
    models = _place(bench, config)
    stepper = _Stepper(models, config)
    rollout = config.rollout
    clocks = []
    for prompts in (1, rollout.prompts_per_step):
        batch = make_batch(
            rollout.height,
            prompts=prompts,
            group_size=rollout.group_size,
            num_sources=config.data.sources,
        )
        clocks.append(PhaseClock())
        stepper.step(batch, clocks[-1])
    first, clock = clocks
    return {
        "images": rollout.prompts_per_step * rollout.group_size,
        "side": rollout.height,
        "denoising_steps": config.decode.training_steps,
        "terms": [*config.reward.terms],
        **{f"first_{name}_seconds": seconds for name, seconds in first.seconds().items()},
        **{f"{name}_seconds": seconds for name, seconds in clock.seconds().items()},
        "floors": _floors(bench, config),
        **bench.peak_bytes(),
    }


def _constant_reward(bench: Bench) -> dict[str, Any]:
    side, prompts = bench.scale.flat_side, 2 * bench.scale.prompts
    nulls = [f"reward.terms.{name}=null" for name in ("lpips", "ssim", "ocr", "aesthetic")]
    term = f"{{kind: custom, weight: 1.0, function: '{__name__}:constant_score'}}"
    config = bench.config(
        *nulls,
        f"+reward.terms.constant={term}",
        "reward.allow_image_only=true",
        f"rollout.height={side}",
        f"rollout.width={side}",
        f"rollout.prompts_per_step={prompts}",
        "rollout.group_size=2",
        "decode.steps=1",
        "decode.rollout_steps=null",
        "train.minibatches=2",
        # Prompts of different lengths are grouped differently in minibatches than in the reference.
        f"train.micro_batch_size={2 * prompts}",
        "loss.kl_coef=0.1",
        "optim.weight_decay=0.1",
    )
    models = _place(bench, config)
    before = {name: each.clone() for name, each in models.policy.state_tensors().items()}
    stepper = _Stepper(models, config)
    for step in range(2):
        batch = make_batch(side, prompts=prompts, group_size=2, first=prompts * step)
        stepper.step(batch, PhaseClock())
    after = models.policy.state_tensors()
    moved = sum(int((after[name] != each).sum()) for name, each in before.items())
    return {"moved_weights": moved, "is_held": moved == 0}


class _Stepper:
    """Runs steps with the same models, like the training loop."""

    def __init__(self, models: Models, config: Config) -> None:
        assert isinstance(models.policy, GlmImagePolicy)
        self._models, self._policy = models, models.policy
        self._config = config
        self._optimizer, self._rate = make_optimizer(self._policy)

    def step(self, batch: PromptBatch, clock: PhaseClock) -> None:
        """Run one step."""
        experience = collect(self._models, batch, self._config, clock=clock)
        with self._models.phase("update", "a step", clock):
            config = self._config
            learner = Learner(
                self._policy,
                self._optimizer,
                self._rate,
                max_grad_norm=config.optim.max_grad_norm,
            )
            update_policy(learner, experience, config.loss, config.train)


def _prepared(bench: Bench, config: Config, prompts: Prompts) -> PreparedRun:
    """The run of a model that has no files."""
    return PreparedRun(
        given=config,
        config=config,
        note="",
        accelerator=Accelerator(cpu=not bench.is_on_accelerator),
        processes=Processes(),
        model=find_model(config.model.path),
        planner=bench.scale.planner,
        prompts=prompts,
        start=None,
        checkpoint=None,
        memory="",
        hints=[],
        asked=[],
    )


def _place(bench: Bench, config: Config) -> Models:
    pipeline = bench.pipeline(reads_sources=config.data.sources > 0)
    with _random_clip(bench.device):
        family = find_model(config.model.path).family
        return place_models(config, family, pipeline, bench.device)


def _reward(bench: Bench) -> Sequence[str]:
    """Terms whose packages are installed, with networks of the real size and no download."""
    clip = "ViT-L-14-quickgelu" if bench.is_on_accelerator else _TINY_CLIP
    options = {
        "lpips": "{kind: lpips, weight: 0.4, pretrained: false}",
        "ssim": "{kind: ssim, weight: 0.2}",
        "ocr": "{kind: ocr, weight: 0.3, engine: rapidocr}",
        "clip_image": f"{{kind: clip_image, weight: 0.1, clip_model: '{clip}'}}",
    }
    missing = [term for term, package in _PACKAGES.items() if find_spec(package) is None]
    kept = [f"{name}: {each}" for name, each in options.items() if name not in missing]
    return ["~reward.terms", f"+reward.terms={{{', '.join(kept)}}}"]


@contextmanager
def _random_clip(device: torch.device) -> Iterator[None]:
    """Give CLIP random weights, created on the device."""

    def load(architecture: str, clip_weights: str, *, key: str) -> Any:
        import open_clip  # noqa: PLC0415

        del clip_weights, key
        with device:
            clip = open_clip.create_model(architecture, load_weights=False)
        return clip.eval().requires_grad_(False)

    with mock.patch("rewards.terms.clip.load_clip", load):
        yield


def _prompts(bench: Bench, folder: Path) -> Prompts:
    """Write files of prompts with a target image, as many as a step takes."""
    side = bench.scale.side
    Image.new("RGB", (side, side), "grey").save(folder / "target.png")
    sets = []
    for name, count in (("training", bench.scale.prompts), ("held_out", 2)):
        path = folder / f"{name}.jsonl"
        rows = [{"prompt": caption(place), "target": "target.png"} for place in range(count)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sets.append(load_prompts(str(path), height=side, width=side))
    return Prompts(*sets)


def _floors(bench: Bench, config: Config) -> dict[str, float]:
    """Floors in seconds by phase."""
    floors = step_floors(
        config,
        bench.scale.planner,
        prompt_tokens=_PROMPT_TOKENS,
        plan=_NOTHING_MOVED,
        device=bench.speed,
    )
    return {name: floor.seconds for name, floor in floors.items()}
