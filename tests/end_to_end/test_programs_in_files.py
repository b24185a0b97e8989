"""Files that hold a program: refused in words, and nothing of them is run."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from easyocr.config import detection_models, recognition_models
from safetensors.torch import save_file

from glm_grpo.errors import CheckpointError, ModelError
from glm_grpo.models.glm_image.loading import load_pipeline
from glm_grpo.run.checkpoints import load_checkpoint, save_checkpoint
from glm_grpo.run.folder import RunFolder
from rewards.build import build_reward
from rewards.config import RewardConfig
from rewards.terms.clip_loading import load_clip
from rewards.types import RewardError

CPU = torch.device("cpu")
NAME = "security_test_clip"
MODEL_CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
TINY = Path(str(files("glm_grpo.tiny").joinpath("weights/pipeline")))


class Payload:
    """Unpickled, it makes a file: what ran once could have done anything."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.trace,))

    @property
    def was_run(self) -> bool:
        return self.trace.exists()

    def as_code(self) -> str:
        """A module that does the same on import."""
        return f"from pathlib import Path\nPath({str(self.trace)!r}).touch()\n"


@pytest.fixture
def payload(tmp_path: Path) -> Payload:
    return Payload(tmp_path / "payload-was-run")


@pytest.fixture
def clip_config(tmp_path: Path) -> Path:
    config = tmp_path / f"{NAME}.json"
    config.write_text(json.dumps(MODEL_CONFIG), encoding="utf-8")
    open_clip.add_model_config(config)
    return config


def test_payload_runs_where_it_is_unpickled(payload: Payload) -> None:
    """Or nothing below would tell."""
    pickle.loads(pickle.dumps(payload))
    assert payload.was_run


def test_checkpoint_with_a_pickle_of_the_right_size_is_refused(
    tmp_path: Path, payload: Payload
) -> None:
    tensors = {"policy": {"a": torch.ones(2)}}
    checkpoint = save_checkpoint(RunFolder(tmp_path), step=1, tensors=tensors, metadata={})
    file = checkpoint / "policy.safetensors"
    torch.save({"a": payload}, file)
    manifest = json.loads((checkpoint / "checkpoint.json").read_text())
    manifest["files"][file.name]["bytes"] = file.stat().st_size
    (checkpoint / "checkpoint.json").write_text(json.dumps(manifest))

    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load_checkpoint(checkpoint)

    assert not payload.was_run


@pytest.mark.parametrize("name", ["clip.pt", "clip.safetensors"])
def test_clip_weights_with_a_program_are_refused(
    tmp_path: Path, payload: Payload, clip_config: Path, name: str
) -> None:
    torch.save({"state_dict": {"visual.proj": payload}}, tmp_path / name)

    with pytest.raises(RewardError, match="cannot be loaded"):
        load_clip(NAME, str(tmp_path / name), key="term.weights")

    assert not payload.was_run


def build(name: str, **options: Any) -> Any:
    section = {"terms": {name: {"weight": 1.0, **options}}, "allow_image_only": True}
    return build_reward(RewardConfig.model_validate(section).terms[name], CPU)


def test_backbone_of_torchvision_with_a_program_is_refused(
    tmp_path: Path, payload: Payload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchvision asks torch for everything a pickle holds, of a file that is there already."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    torch.save({"features.0.weight": payload}, folder / "alexnet-owt-7be5be79.pth")

    with pytest.raises(RewardError, match="may be a program"):
        build("lpips")

    assert not payload.was_run


def test_weights_of_easyocr_with_a_program_are_refused(
    tmp_path: Path, payload: Payload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("easyocr.easyocr.MODULE_PATH", str(tmp_path))
    (tmp_path / "model").mkdir()
    for model in (detection_models["craft"], recognition_models["gen2"]["english_g2"]):
        file = tmp_path / "model" / model["filename"]
        torch.save({"weight": payload}, file)
        monkeypatch.setitem(model, "md5sum", hashlib.md5(file.read_bytes()).hexdigest())

    with pytest.raises(RewardError, match="may be a program"):
        build("ocr", engine="easyocr")

    assert not payload.was_run


def test_code_beside_a_models_weights_is_not_run(tmp_path: Path, payload: Payload) -> None:
    """A pipeline may name a module of its own folder as the class of a part."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["transformer"] = ["own_code", "Transformer"]
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "transformer" / "own_code.py").write_text(
        payload.as_code() + "class Transformer: pass\n"
    )

    with pytest.raises(ModelError, match="transformer is .*own_code"):
        load_pipeline(str(folder), dtype=torch.float32)

    assert not payload.was_run


@pytest.mark.parametrize("part", ["transformer", "vision_language_encoder"])
def test_pickled_weights_of_a_model_are_refused(
    tmp_path: Path, payload: Payload, part: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    for file in (folder / part).glob("*.safetensors*"):
        file.unlink()
    for name in ("diffusion_pytorch_model.bin", "pytorch_model.bin"):
        torch.save({"weight": payload}, folder / part / name)

    with pytest.raises(ModelError, match="no file named .*safetensors"):
        load_pipeline(str(folder), dtype=torch.float32)

    assert not payload.was_run


def own_code(folder: Path, payload: Payload, auto_map: dict[str, Any]) -> None:
    """A repository of transformers whose config says that its classes are in a file beside it."""
    folder.mkdir()
    (folder / "own_code.py").write_text(payload.as_code())
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto_map}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"auto_map": auto_map}))
    (folder / "processor_config.json").write_text(json.dumps({"auto_map": auto_map}))


@pytest.fixture
def would_say_yes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A user at the terminal who agrees to everything that is asked there."""
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question="": asked.append(question) or "y")
    return asked


def test_code_beside_a_processor_is_not_run_and_no_one_is_asked(
    tmp_path: Path, payload: Payload, would_say_yes: list[str]
) -> None:
    own_code(tmp_path / "own", payload, {"AutoProcessor": "own_code.Own"})

    with pytest.raises(RewardError, match="pick_score.processor"):
        build("pick_score", model=str(tmp_path), processor=str(tmp_path / "own"))

    assert not payload.was_run
    assert would_say_yes == []


def test_code_beside_a_tokenizer_that_a_config_trusts_is_not_run_and_no_one_is_asked(
    tmp_path: Path, payload: Payload, would_say_yes: list[str]
) -> None:
    auto_map = {"AutoConfig": "own_code.Own", "AutoTokenizer": ["own_code.Own", None]}
    own_code(tmp_path / "own", payload, auto_map)
    trusting = {
        "hf_tokenizer_name": str(tmp_path / "own"),
        "tokenizer_kwargs": {"trust_remote_code": True},
    }
    text = {**MODEL_CONFIG["text_cfg"], **trusting}
    config = tmp_path / f"{NAME}_trusting.json"
    config.write_text(json.dumps({**MODEL_CONFIG, "text_cfg": text}))
    weights = tmp_path / "weights.safetensors"
    with torch.random.fork_rng(devices=[]):
        open_clip.add_model_config(config)
        save_file(open_clip.create_model(config.stem).state_dict(), weights)

    with pytest.raises(RewardError, match="cannot be loaded"):
        build("clip_score", clip_model=str(config), clip_weights=str(weights))

    assert not payload.was_run
    assert would_say_yes == []
