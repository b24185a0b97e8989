from __future__ import annotations

import errno
import logging
import os
import resource
from pathlib import Path

import pytest
import torch
from torch import Tensor

from glm_grpo.errors import CheckpointError, NonFiniteError, StorageError
from glm_grpo.run.checkpoints import (
    forget_checkpoints_after,
    load_checkpoint,
    newest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from glm_grpo.run.folder import RunFolder


def save(folder: RunFolder, step: int) -> Path:
    tensors = {"policy": {"weight": torch.arange(6.0).reshape(2, 3)}}
    return save_checkpoint(folder, step=step, tensors=tensors, metadata={"best": 0.5})


def stored_steps(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.checkpoints_dir.iterdir())


def test_checkpoint_round_trip_is_exact(tmp_path: Path) -> None:
    tensors: dict[str, dict[str, Tensor]] = {
        "policy": {
            "half": torch.tensor([1.5, -0.0, 3.0e38], dtype=torch.bfloat16),
            "transposed": torch.arange(6).reshape(2, 3).T,
            "scalar": torch.tensor(7.0, dtype=torch.float64),
            "empty": torch.zeros(0, 4),
        },
        "optimizer": {"state/0/step": torch.tensor(3.0)},
    }
    metadata = {"seed": 2**63 - 1, "rate": 0.1, "groups": [{"lr": 1e-6}], "best": None}
    path = save_checkpoint(RunFolder(tmp_path), step=12, tensors=tensors, metadata=metadata)
    checkpoint = load_checkpoint(path)
    assert path.name == "step-000012"
    assert checkpoint.step == 12
    assert checkpoint.metadata == metadata
    assert checkpoint.tensors.keys() == tensors.keys()
    for stem, named in tensors.items():
        assert checkpoint.tensors[stem].keys() == named.keys()
        for name, tensor in named.items():
            loaded = checkpoint.tensors[stem][name]
            assert loaded.dtype == tensor.dtype
            assert torch.equal(loaded, tensor)


def test_save_checkpoint_takes_tensors_that_share_memory(tmp_path: Path) -> None:
    weight = torch.arange(4.0)
    tensors = {"policy": {"embedding": weight, "head": weight, "part": weight[1:3]}}
    path = save_checkpoint(RunFolder(tmp_path), step=1, tensors=tensors, metadata={})
    loaded = load_checkpoint(path).tensors["policy"]
    assert loaded["head"].tolist() == loaded["embedding"].tolist() == [0, 1, 2, 3]
    assert loaded["part"].tolist() == [1, 2]


def test_checkpoints_are_readable_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = save(RunFolder(tmp_path), 1)
    finally:
        os.umask(before)
    assert {each.name: each.stat().st_mode & 0o777 for each in path.iterdir()} == {
        "checkpoint.json": 0o640,
        "policy.safetensors": 0o640,
    }


def test_values_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    save(folder, 1)
    broken = {"first": torch.ones(3), "last": torch.tensor([0.0, float("-inf")])}
    with pytest.raises(NonFiniteError, match="policy: last "):
        save_checkpoint(folder, step=2, tensors={"policy": broken}, metadata={})
    assert stored_steps(folder) == ["step-000001"]


@pytest.mark.parametrize("name", ["policy.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("is_torn", [True, False], ids=["torn", "missing"])
def test_load_checkpoint_names_a_file_that_is_torn_or_missing(
    name: str, is_torn: bool, tmp_path: Path
) -> None:
    path = save(RunFolder(tmp_path), 1)
    if is_torn:
        os.truncate(path / name, (path / name).stat().st_size - 1)
    else:
        (path / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(path)


def test_load_checkpoint_refuses_a_manifest_of_another_format(tmp_path: Path) -> None:
    path = save(RunFolder(tmp_path), 1)
    manifest = (path / "checkpoint.json").read_text()
    (path / "checkpoint.json").write_text(manifest.replace('"format": 2', '"format": 1'))
    with pytest.raises(CheckpointError, match=r"checkpoint\.json .*format is 1: .*2"):
        load_checkpoint(path)


def test_save_checkpoint_leaves_the_earlier_ones_when_the_disk_refuses(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    save(folder, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StorageError, match=os.strerror(errno.EFBIG)):
            save_checkpoint(
                folder, step=2, tensors={"policy": {"w": torch.zeros(1000)}}, metadata={}
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert stored_steps(folder) == ["step-000001"]
    assert load_checkpoint(folder.checkpoint_dir(1)).step == 1


def test_newest_checkpoint_goes_by_number_not_by_name_or_age(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    # As text, step-1000000 sorts before step-999999.
    for step in (1_000_000, 999_999, 9):
        save(folder, step)
    assert newest_checkpoint(folder) == folder.checkpoint_dir(1_000_000)
    assert newest_checkpoint(folder, before=1_000_000) == folder.checkpoint_dir(999_999)


def test_newest_checkpoint_passes_over_damaged_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3):
        save(folder, step)
    os.truncate(folder.checkpoint_dir(3) / "policy.safetensors", 10)
    (folder.checkpoint_dir(2) / "checkpoint.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(folder) == folder.checkpoint_dir(1)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "step-000003/policy.safetensors" in caplog.text
    assert "step-000002/checkpoint.json" in caplog.text


def test_newest_checkpoint_is_none_without_any(tmp_path: Path) -> None:
    assert newest_checkpoint(RunFolder(tmp_path)) is None


@pytest.mark.parametrize(
    ("keep", "best_step", "left"),
    [
        (2, 1, ["step-000001", "step-000003", "step-000004"]),
        (1, 4, ["step-000004"]),
        (9, 1, ["step-000001", "step-000002", "step-000003", "step-000004"]),
    ],
)
def test_prune_checkpoints_keeps_the_newest_and_the_best(
    keep: int, best_step: int | None, left: list[str], tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3, 4):
        save(folder, step)
    (folder.checkpoints_dir / ".step-000005.99.tmp").mkdir()
    prune_checkpoints(folder, keep, best_step)
    assert stored_steps(folder) == left


def test_forget_checkpoints_after_a_step_keeps_it_and_those_before(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3):
        save(folder, step)
    (folder.checkpoints_dir / ".step-000004.99.tmp").mkdir()
    forget_checkpoints_after(folder, 2)
    assert stored_steps(folder) == ["step-000001", "step-000002"]
