"""Build a detector from its name: a hub id, a folder, or a function of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rewards.terms.detectors.base import Detector, Limits
from rewards.terms.detectors.boxes import BoxDetector
from rewards.terms.detectors.files import (
    OWL,
    SEGMENTATION,
    check_files,
    detector_bytes,
    find_folder,
    read_config,
    refusing,
)
from rewards.terms.detectors.function import (
    FunctionDetector,
    declared_classes,
    load_detecting_function,
)
from rewards.terms.detectors.segmentation import Mask2FormerDetector, Preparation
from rewards.terms.detectors.zero_shot import GroundingDinoDetector, Owlv2Detector

# transformers is imported in functions, so that configs without a detector start faster.

_PREPROCESSOR = "preprocessor_config.json"


def is_function(name: str) -> bool:
    """Whether a name is that of a function, `file.py:function` or `module:function`."""
    return ":" in name and not Path(name).is_dir()


def check_detector(name: str, *, key: str, folder: str | None = None) -> None:
    """Check a detector before any weights are loaded.

    Args:
        name: A hub id, a folder, or a function.
        key: Config key of `name`, for errors.
        folder: Where a function is searched for first.

    Raises:
        RewardError: It cannot be used, or the config of a hub id cannot be reached.
    """
    if is_function(name):
        load_detecting_function(name, folder, key=key)
    else:
        check_files(name, key=key)


def detector_classes(name: str, *, key: str, folder: str | None = None) -> tuple[str, ...] | None:
    """Classes of a detector, from its config or a function's `classes`; None if it may be any.

    Classes of COCO have the names that GenEval's prompts use, such as computer mouse.

    Args:
        folder: Where a function is searched for first.

    Raises:
        RewardError: As `check_detector`.
    """
    if is_function(name):
        return declared_classes(load_detecting_function(name, folder, key=key))
    return read_config(name, key=key).labels


def detector_memory_bytes(name: str) -> int:
    """Size of a detector's fp32 weights; 0 for a function, and for a hub id not yet downloaded."""
    return 0 if is_function(name) else detector_bytes(name)


def load_detector(
    name: str,
    device: torch.device,
    *,
    key: str,
    limits: Limits | None = None,
    folder: str | None = None,
) -> Detector:
    """Load a detector.

    Args:
        name: A hub id or folder of a stock transformers class: Mask2Former (masks), RT-DETR,
            RT-DETRv2 or D-FINE (boxes), OWLv2 or GroundingDINO (boxes, any class); or a function,
            `file.py:function` or `module:function`, see `FunctionDetector`.
        key: Config key of `name`, for errors.
        limits: Which candidates it returns.
        folder: Where a function is searched for first.

    Raises:
        RewardError: It cannot be loaded, or is of another class.
    """
    limits = limits or Limits()
    if is_function(name):
        function = load_detecting_function(name, folder, key=key)
        return FunctionDetector(function, limits, name=name, key=key)
    config = read_config(name, key=key)
    files = find_folder(name, key=key)
    check_files(str(files), key=key)
    with refusing(key, name):
        processor = _load_processor(files, is_zero_shot=config.labels is None)
        model = _load_model(files, config.architecture).to(device)
    if config.architecture in OWL:
        return Owlv2Detector(model, processor, limits)
    if config.labels is None:
        return GroundingDinoDetector(model, processor, limits)
    if config.architecture in SEGMENTATION:
        return Mask2FormerDetector(model, config.labels, Preparation.of(processor), limits)
    return BoxDetector(model, processor, config.labels, limits)


def _load_processor(folder: Path, *, is_zero_shot: bool) -> Any:
    """The processor of a zero-shot model, or a model's image processor if it has one."""
    from transformers import AutoImageProcessor, AutoProcessor  # noqa: PLC0415

    if not is_zero_shot and not (folder / _PREPROCESSOR).is_file():
        return None
    kind = AutoProcessor if is_zero_shot else AutoImageProcessor
    # torchvision's backend works on the model's device. Trust is explicit, because otherwise
    # transformers asks on the terminal.
    return kind.from_pretrained(
        folder, local_files_only=True, backend="torchvision", trust_remote_code=False
    )


def _load_model(folder: Path, architecture: str) -> Any:
    import transformers  # noqa: PLC0415

    # Weights missing in a file are drawn randomly; fork_rng restores the generator.
    with torch.random.fork_rng(devices=[]):
        model, report = getattr(transformers, architecture).from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            use_safetensors=True,
        )
    # Other buffers, such as the weights of a loss, follow from the config.
    learned = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    missing = sorted(
        name for name in report["missing_keys"] if name in learned or "running_" in name
    )
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")
    return model.eval().requires_grad_(False)
