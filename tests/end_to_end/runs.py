"""Parts of tests of whole runs: a reward, a signal at a step, and what a run left."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from glm_grpo.run.checkpoints import load_checkpoint
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics, read_table
from rewards.base import Reward
from rewards.score import Scorer, Term


def pay_for(term: Reward, weight: float = 1.0, **options: Any) -> Callable[[Any], Any]:
    """Makes one term the whole reward: a `change_stage` of `make_trainer`."""
    scorer = Scorer([Term("brightness", term, weight, **options)])
    return lambda models: dataclasses.replace(models, scorer=scorer)


def signal_at(step: int, number: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Sends this process a signal as a step, from 1, begins: a `change_step` of `make_trainer`."""

    def change(take: Callable[..., Any]) -> Callable[..., Any]:
        def signalled(at: int, *arguments: Any, **options: Any) -> Any:
            if at == step:
                os.kill(os.getpid(), number)
            return take(at, *arguments, **options)

        return signalled

    return change


def comparable_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All metrics that depend neither on the clock nor on memory."""
    measured = ("time/", "throughput/", "memory/")
    return [
        {name: value for name, value in row.items() if not name.startswith(measured)}
        for row in read_metrics(RunFolder(run_dir))
    ]


def read_record(run_dir: Path) -> dict[str, Any]:
    """Everything in the folder that must be equal in two such runs.

    Left out is what depends on the clock, on memory or on the folder's name.
    """
    folder = RunFolder(run_dir)
    # A list, so that a step recorded twice is noticed.
    record: dict[str, Any] = {"metrics": comparable_metrics(run_dir)}
    for table in (*folder.rollouts_dir.iterdir(), *folder.evaluations_dir.iterdir()):
        record[f"{table.parent.name}/{table.name}"] = read_table(table).to_pylist()
    for image in folder.images_dir.rglob("*.png"):
        record[str(image.relative_to(run_dir))] = hashlib.sha256(image.read_bytes()).hexdigest()
    for path in folder.checkpoints_dir.iterdir():
        checkpoint = load_checkpoint(path)
        record[path.name] = checkpoint.metadata
        for stem, named in checkpoint.tensors.items():
            for name, tensor in named.items():
                record[f"{path.name}/{stem}/{name}"] = tensor.flatten().tolist()
    record["canaries"] = folder.canaries_path.read_text()
    # All files and folders, so that leftovers of a kill are noticed; TensorBoard's hold times.
    paths = (path.relative_to(run_dir) for path in run_dir.rglob("*"))
    record["names"] = sorted(str(path) for path in paths if path.parts[0] != "tensorboard")
    return record
