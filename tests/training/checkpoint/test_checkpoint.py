from __future__ import annotations

import errno
import json
import logging
import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from glm_grpo.errors import CheckpointError, StorageError
from glm_grpo.run.folder import RunFolder
from glm_grpo.training.checkpoint import files as checkpoint_module
from glm_grpo.training.checkpoint.files import (
    load_checkpoint,
    newest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)


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


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_load_checkpoint_refuses_values_that_are_not_finite(tmp_path: Path, value: float) -> None:
    path = save(RunFolder(tmp_path), 1)
    # Saving refuses them too: this is a file of somebody else's.
    save_file({"first": torch.ones(3), "last": torch.tensor([value])}, path / "policy.safetensors")
    with pytest.raises(
        CheckpointError, match=r"policy\.safetensors: last holds values that are not"
    ):
        load_checkpoint(path, is_verified=True)


def test_load_checkpoint_takes_metadata_that_json_changes(tmp_path: Path) -> None:
    # Keys sort differently as numbers (2, 10) and as text ("10", "2"); tuples become lists.
    metadata = {"by_step": {2: "a", 10: (1, 2)}}
    path = save_checkpoint(RunFolder(tmp_path), step=1, tensors={}, metadata=metadata)
    assert load_checkpoint(path).metadata == {"by_step": {"2": "a", "10": [1, 2]}}


@pytest.mark.parametrize("name", ["policy.safetensors", "checkpoint.json"])
def test_load_checkpoint_notices_every_flipped_bit(name: str, tmp_path: Path) -> None:
    path = save(RunFolder(tmp_path), 1)
    content = (path / name).read_bytes()
    for position in range(0, len(content), 7):
        flipped = bytearray(content)
        flipped[position] ^= 1 << (position % 8)
        (path / name).write_bytes(flipped)
        # White space between the items of a manifest carries nothing.
        if name == "checkpoint.json" and _says_the_same(bytes(flipped), content):
            continue
        with pytest.raises(CheckpointError, match=name):
            load_checkpoint(path)


def _says_the_same(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


@pytest.mark.parametrize("name", ["policy.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("size", [0, 20])
def test_load_checkpoint_names_a_torn_file(name: str, size: int, tmp_path: Path) -> None:
    path = save(RunFolder(tmp_path), 1)
    os.truncate(path / name, size)
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(path)


@pytest.mark.parametrize("name", ["policy.safetensors", "checkpoint.json"])
def test_load_checkpoint_names_a_missing_file(name: str, tmp_path: Path) -> None:
    path = save(RunFolder(tmp_path), 1)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        load_checkpoint(path)


@pytest.mark.parametrize("content", ["[]", "{}", "null", '{"format": 2, "sha256": "0"}'])
def test_load_checkpoint_refuses_a_manifest_of_another_kind(content: str, tmp_path: Path) -> None:
    path = save(RunFolder(tmp_path), 1)
    (path / "checkpoint.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is damaged"):
        load_checkpoint(path)


def test_a_checkpoint_of_another_format_is_neither_read_nor_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    # Its metadata has not all that a run needs to go on.
    with monkeypatch.context() as older:
        older.setattr(checkpoint_module, "FORMAT_VERSION", 1)
        path = save(folder, 1)
    refused = r"has format 1: this version reads 2\. Use the version of glm-grpo that wrote it"
    with pytest.raises(CheckpointError, match=refused):
        load_checkpoint(path)
    # A run that found none would begin anew in the same folder.
    with pytest.raises(CheckpointError, match=refused):
        newest_checkpoint(folder)


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
        (2, None, ["step-000003", "step-000004"]),
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


def test_prune_checkpoints_never_removes_all(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    save(folder, 1)
    with pytest.raises(ValueError, match="keep is 0"):
        prune_checkpoints(folder, 0, None)
    assert stored_steps(folder) == ["step-000001"]
