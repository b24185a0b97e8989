"""Describe what a run is made from, and compare it with what it began with; see `Provenance`."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from glm_grpo.config import (
    LONGEST_NOTES,
    Config,
    flatten,
    local_paths,
    set_key,
    shell_override,
    to_yaml,
    with_absolute_paths,
)
from glm_grpo.config.paths import users_functions
from glm_grpo.data.prompts import PromptSource, shared_rows
from glm_grpo.digests import digest, digest_files
from glm_grpo.errors import CheckpointError
from glm_grpo.models.find import FoundModel
from glm_grpo.output import printable
from glm_grpo.run.config import read_config
from glm_grpo.run.differences import compared_by_content
from glm_grpo.run.folder import RunFolder, storage_errors, write_atomically
from glm_grpo.run.provenance import (
    Provenance,
    changed_prompts,
    changed_versions,
    describe_changes,
    read_provenance,
    write_provenance,
)
from rewards.options import changeable_keys

logger = logging.getLogger(__name__)

_PACKAGES = (
    *("glm-grpo", "torch", "torchvision", "transformers", "diffusers", "peft", "accelerate"),
    *("bitsandbytes", "numpy", "pillow", "lpips", "torchmetrics", "open-clip-torch"),
    *("easyocr", "rapidocr", "onnxruntime", "opencv-python", "opencv-python-headless"),
    "rapidfuzz",
)
"""Packages that make images or scores."""

_MODEL, _START = "model.path", "model.start_from"


def describe_provenance(
    config: Config,
    model: FoundModel,
    *,
    held_out: PromptSource,
    training: PromptSource | None,
    devices: str = "",
) -> Provenance:
    """Read and digest what a run is made from, beside its settings.

    Args:
        config: Settings of the run, from `pin_start`.
        model: Model of the run.
        held_out: Its held-out prompts.
        training: Its training prompts; None for an evaluation.
        devices: What it is trained on.
    """
    digests, shared = _digest_prompts(held_out), None
    if training is not None:
        ids = [*digests]
        shared = tuple(ids[row] for row in shared_rows(held_out, training))
    return Provenance(
        began=datetime.now(UTC).isoformat(timespec="seconds"),
        held_out=digests,
        training={} if training is None else _digest_prompts(training),
        files=_digest_files(config, model.path),
        code=_digest_code(config),
        scorers=_find_scorers(config),
        versions=_find_versions(),
        devices=devices,
        shared=shared,
    )


def _digest_prompts(prompts: PromptSource) -> dict[str, str]:
    with storage_errors("read", Path(prompts.path)):
        return prompts.digests()


def _digest_files(config: Config, model: str) -> dict[str, str]:
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
    for key, function in users_functions(config).items():
        for place, (module, source) in enumerate(function.sources().items()):
            # As runs of earlier versions named the only module that they looked at.
            digests[f"{key}.{function.option}" + (f"/{module}" if place else "")] = digest(source)
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


def keep_provenance(
    folder: RunFolder, provenance: Provenance, config: Config, *, done: int | None
) -> None:
    """Store what a run begins with; refuse to resume it with something else.

    Only the process that writes the run folder may call this.

    Args:
        provenance: What the run would be trained with now.
        config: Its config as given.
        done: Steps of the checkpoint from which it is resumed; None: it begins.
    """
    stored, notes = read_provenance(folder), read_config(folder).run.notes
    # Without a checkpoint, everything recorded is replaced.
    if stored is not None and done is not None:
        changes = _accepted_changes(folder, stored, provenance, config)
        provenance = replace(
            provenance,
            began=stored.began,
            # With that of a start that is gone by now.
            files={**stored.files, **provenance.files},
            changed=stored.changed_in(provenance),
            devices=stored.devices_with(provenance),
            shared=stored.shared_with(provenance),
        )
        if changes:
            note = printable(f"changed after step {done}: {'; '.join(changes)}")
            logger.warning("%s", note)
            # Earlier notes give way: this one is nowhere else.
            kept = (notes or "")[: max(0, LONGEST_NOTES - len(note) - 1)]
            notes = "\n".join(filter(None, [kept, note]))[:LONGEST_NOTES]
    settings = _settings(config)
    # Where files and scorers are now, which evaluations read too.
    found = (key for key in changeable_keys(config) if key.startswith(("reward.", "loss.")))
    moved = {key: settings[key] for key in (*compared_by_content(folder, config), *found)}
    # A run that is extended keeps its new length for the next resume.
    own = {"train.steps": config.train.steps, "eval.group_by": config.eval.group_by}
    _update_config(folder, {**moved, **own, "run.notes": notes})
    # Last: after a kill before it, the change is noted again, not forgotten.
    write_provenance(folder, provenance)


def _settings(config: Config) -> dict[str, object]:
    return flatten(with_absolute_paths(config).model_dump(mode="json"))


def _accepted_changes(
    folder: RunFolder, stored: Provenance, provenance: Provenance, config: Config
) -> list[str]:
    """Describe what changed, unless it is refused; see `keep_provenance`."""
    start = shell_override("model.start_from", str(folder.path))
    new_run = f"start a new run with {start} and another run_dir"
    settings, before = _settings(config), _settings(read_config(folder))
    gone = [key for key in stored.files.keys() - provenance.files if settings[key] != before[key]]
    if gone:
        raise CheckpointError(
            f"{gone[0]} = {settings[gone[0]]}: the run in {folder.path} began with "
            f"{before[gone[0]]}, and the files of the two cannot be compared; give the path of the "
            "same files"
        )
    held_out = changed_prompts(stored.held_out, provenance.held_out)
    if held_out:
        evaluated = shell_override("data.eval_path", str(settings["data.eval_path"]))
        raise CheckpointError(
            f"data.eval_path = {config.data.eval_path}: these are not the held-out prompts that "
            f"the run in {folder.path} was evaluated on ({held_out}), so its scores before and "
            "after could not be compared. Restore them, evaluate a checkpoint on the new ones "
            f"(glm-grpo eval {shlex.quote(str(folder.path))} {evaluated}), or {new_run}"
        )
    changes = describe_changes(stored, provenance, settings)
    if changes and not config.train.resume_with_changes:
        raise CheckpointError(
            f"the run in {folder.path} was trained with something else: {'; '.join(changes)}. "
            f"Restore what it was trained with, {new_run}, or repeat the command with "
            "train.resume_with_changes=true: the log and run.notes then state the changes"
        )
    return changes + changed_versions(stored.versions, provenance.versions)


def _update_config(folder: RunFolder, changes: Mapping[str, object]) -> None:
    before = read_config(folder)
    values = before.model_dump(mode="json")
    for key, value in changes.items():
        set_key(values, key, value)
    after = Config.model_validate(values)
    if after != before:
        write_atomically(folder.config_path, to_yaml(after).encode())
