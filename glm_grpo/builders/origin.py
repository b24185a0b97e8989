"""Describe what a run begins with, see `Origin`."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from glm_grpo.builders.models import model_path
from glm_grpo.config import Config, local_paths
from glm_grpo.config.paths import custom_functions
from glm_grpo.data.prompts import PromptSource, shared_rows
from glm_grpo.digests import digest, digest_files
from glm_grpo.run.folder import storage_errors
from glm_grpo.run.origin import Origin
from rewards.terms.custom import find_sources

_PACKAGES = (
    *("glm-grpo", "torch", "torchvision", "transformers", "diffusers", "peft", "accelerate"),
    *("bitsandbytes", "numpy", "pillow", "lpips", "torchmetrics", "open-clip-torch"),
    *("easyocr", "rapidocr", "onnxruntime", "opencv-python", "opencv-python-headless"),
    "rapidfuzz",
)
"""Packages that make images or scores."""

_MODEL, _START = "model.path", "model.start_from"


def describe_origin(
    config: Config, *, held_out: PromptSource, training: PromptSource | None
) -> Origin:
    """Read and digest what a run is made from, beside its settings.

    Args:
        config: Settings of the run, from `pin_start`.
        held_out: Its held-out prompts.
        training: Its training prompts; None for an evaluation.

    Raises:
        StorageError: A file cannot be read.
        RewardError: A scorer in another process does not answer.
    """
    digests, shared = _digest_prompts(held_out), None
    if training is not None:
        ids = [*digests]
        shared = tuple(ids[row] for row in shared_rows(held_out, training))
    return Origin(
        began=datetime.now(UTC).isoformat(timespec="seconds"),
        held_out=digests,
        training={} if training is None else _digest_prompts(training),
        files=_digest_files(config),
        code=_digest_code(config),
        scorers=_find_scorers(config),
        versions=_find_versions(),
        shared=shared,
    )


def _digest_prompts(prompts: PromptSource) -> dict[str, str]:
    with storage_errors("read", Path(prompts.path)):
        return prompts.digests()


def _digest_files(config: Config) -> dict[str, str]:
    model = model_path(config.model.path)
    paths = {_MODEL: Path(model)} if Path(model).exists() else {}
    paths |= {
        key: path
        for key, path in local_paths(config).items()
        if key.startswith("reward.terms.") or (key == _START and path.exists())
    }
    digests = {}
    for key, path in paths.items():
        with storage_errors("read", path):
            digests[key] = digest_files(path)
    if _MODEL not in paths:
        with suppress(LocalEntryNotFoundError):
            # Files of a hub id are in a folder with the name of their revision.
            digests[_MODEL] = Path(snapshot_download(model, local_files_only=True)).name
    return digests


def _digest_code(config: Config) -> dict[str, str]:
    digests = {}
    for key, options in custom_functions(config).items():
        sources = find_sources(options.function, options.folder)
        for place, (module, source) in enumerate(sources.items()):
            # As runs of earlier versions named the only module that they looked at.
            digests[f"{key}.function" + (f"/{module}" if place else "")] = digest(source)
    return digests


def _find_scorers(config: Config) -> dict[str, str]:
    found = {
        f"reward.terms.{name}.url": term.scorer() for name, term in config.reward.terms.items()
    }
    return {key: scorer for key, scorer in found.items() if scorer is not None}


def _find_versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
