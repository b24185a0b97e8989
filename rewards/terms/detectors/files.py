"""Find a detector's files, and read what its config says before its weights are loaded."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors import safe_open

from rewards.base import FLOAT32_BYTES
from rewards.types import RewardError, describe_error

SEGMENTATION = ("Mask2FormerForUniversalSegmentation",)
BOXES = ("RTDetrForObjectDetection", "RTDetrV2ForObjectDetection", "DFineForObjectDetection")
OWL = ("Owlv2ForObjectDetection",)
GROUNDING = ("GroundingDinoForObjectDetection",)
ARCHITECTURES = (*SEGMENTATION, *BOXES, *OWL, *GROUNDING)
"""Stock classes of transformers that are supported, by how they are used."""

_CONFIG = "config.json"
_FILES = ("*.json", "*.safetensors", "*.txt")
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_LONGEST_CAUSE = 400  # characters: weights of another model differ in thousands of tensors

_GENEVAL_NAMES = {
    "mouse": "computer mouse",
    "remote": "tv remote",
    "keyboard": "computer keyboard",
    # Names that some published models have for COCO's classes.
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
}
"""Classes of COCO that GenEval's prompts call otherwise."""

_ONLY_COCO = {"mouse", "remote", "keyboard"}
"""Together they tell COCO's classes from others, whose mouse may be an animal."""


@dataclass(frozen=True)
class DetectorConfig:
    """What a detector's config says.

    Attributes:
        architecture: One of `ARCHITECTURES`.
        labels: Classes in the order of the model's scores, COCO's by the names of GenEval; None for
            a zero-shot detector.
    """

    architecture: str
    labels: tuple[str, ...] | None


def check_files(source: str, *, key: str) -> None:
    """Check a folder, or the config of a hub id, without loading weights.

    Args:
        source: A hub id, or a folder.
        key: Config key of `source`, for errors.

    Raises:
        RewardError: It is no supported detector, lacks files, or cannot be reached.
    """
    config = read_config(source, key=key)
    folder = Path(source)
    if not folder.is_dir():
        return
    if not any(folder.glob("*.safetensors")):
        raise RewardError(
            f"{key} {source!r} has no weights: it must have .safetensors files, as "
            "model.save_pretrained(folder) writes them"
        )
    has_processor = any((folder / name).is_file() for name in _PROCESSORS)
    if config.labels is None and not (
        has_processor and (folder / "tokenizer_config.json").is_file()
    ):
        raise RewardError(
            f"{key} {source!r} has no processor, which a zero-shot detector needs: copy "
            "preprocessor_config.json and the tokenizer's files from the model's hub page, or "
            "write them with processor.save_pretrained(folder)"
        )


def read_config(source: str, *, key: str) -> DetectorConfig:
    """Read a config from a folder or the hub; see `check_files`."""
    path = _find_config(source, key=key)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RewardError(
            f"{key} {source!r}: {path} is not JSON ({error}); copy it from the model's hub page"
        ) from error
    architectures = config.get("architectures") if isinstance(config, dict) else None
    architecture = architectures[0] if architectures else None
    if architecture not in ARCHITECTURES:
        what = f"is a {architecture}" if architecture else f"names no architecture in {_CONFIG}"
        raise RewardError(
            f"{key} {source!r} {what}; it must be one of {', '.join(ARCHITECTURES)}. For another "
            "detector, write a function detect(pixels, classes) and name it file.py:detect"
        )
    if architecture in (*OWL, *GROUNDING):
        return DetectorConfig(architecture, None)
    names = config.get("id2label")
    if not isinstance(names, Mapping) or not names:
        raise RewardError(
            f"{key} {source!r} has no id2label in {_CONFIG}, the names of its classes; set "
            "model.config.id2label and save the model again"
        )
    ordered = [str(names[index]) for index in sorted(names, key=int)]
    return DetectorConfig(architecture, _geneval_names(ordered))


def detector_bytes(source: str) -> int:
    """Size of the weights in float32, from their headers; 0 until they are downloaded."""
    folder = _folder_on_disk(source)
    total = 0
    for file in [] if folder is None else folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            shapes = (tensors.get_slice(name).get_shape() for name in tensors.keys())  # noqa: SIM118
            total += sum(prod(shape) for shape in shapes) * FLOAT32_BYTES
    return total


def find_folder(source: str, *, key: str) -> Path:
    """A detector's folder; files of a hub id are downloaded once into HF_HOME."""
    import huggingface_hub  # noqa: PLC0415

    if Path(source).is_dir():
        return Path(source)
    with refusing(key, source):
        # One request; loading by hub id would request each file, with retries for each.
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=list(_FILES)))


@contextmanager
def refusing(key: str, source: str) -> Iterator[None]:
    """Turn what libraries raise, for wrong files or without a network, into an error."""
    try:
        yield
    # Libraries raise whatever a wrong byte leads to.
    except Exception as error:
        cause = textwrap.shorten(describe_error(error), _LONGEST_CAUSE)
        raise RewardError(
            f"{key} {source!r} cannot be loaded ({cause}). It must be a folder, or a hub id "
            "owner/name, which is downloaded once into HF_HOME; without a network, run "
            "hf download owner/name --local-dir FOLDER elsewhere, and name the folder"
        ) from error


def _find_config(source: str, *, key: str) -> Path:
    import huggingface_hub  # noqa: PLC0415

    folder = Path(source)
    if source.endswith(".py"):
        raise RewardError(
            f"{key} {source!r} names no function in the file; write {source}:detect if it is "
            "called detect"
        )
    if not folder.is_dir():
        with refusing(key, source):
            return Path(huggingface_hub.hf_hub_download(source, _CONFIG))
    if not (folder / _CONFIG).is_file():
        raise RewardError(
            f"{key} {source!r} has no {_CONFIG}; name the folder of a model that "
            "model.save_pretrained(folder) wrote, or that was downloaded from the hub"
        )
    return folder / _CONFIG


def _folder_on_disk(source: str) -> Path | None:
    import huggingface_hub  # noqa: PLC0415
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    if Path(source).is_dir():
        return Path(source)
    try:
        return Path(huggingface_hub.snapshot_download(source, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _geneval_names(labels: Sequence[str]) -> tuple[str, ...]:
    if not _ONLY_COCO.issubset(labels):
        return tuple(labels)
    return tuple(_GENEVAL_NAMES.get(label, label) for label in labels)
