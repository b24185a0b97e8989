"""What a run began with: digests of its prompts, files and code, and versions of libraries.

Settings alone do not say this: a file may change under its name. A resumed run and `compare` read
it to see whether images and scores are still made in the same way.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from glm_grpo.errors import StorageError
from glm_grpo.run.folder import RunFolder, storage_errors, write_atomically
from glm_grpo.run.tables import check_stored

_MOST_NAMED = 3
"""Prompts or modules named for each kind of change, at most."""

Digests = Mapping[str, str]
"""Digest by name, as hexadecimal digits."""


@dataclass(frozen=True)
class Provenance:
    """What images and scores of a run are made from, beside its settings.

    Attributes:
        began: Time at which the run began, ISO 8601 in UTC.
        held_out: Digest of each held-out prompt, with its texts and images, by id; behind a hyphen,
            that of its metadata. Runs of versions without metadata do not have the latter.
        training: Likewise for the training prompts, in their order.
        files: Digest of the model, of the checkpoint that the run starts from, and of each file
            that a term reads, by config key.
        code: Digest of the source of each custom function, by config key; of further modules that
            it is made of, by `KEY/MODULE`.
        versions: Version by name of the installed package.
        scorers: Name and digest of each scorer in another process, by the key of its address.
        devices: What the run was trained on, such as `2 x NVIDIA H100 80GB HBM3`; of a run that was
            resumed on other devices, all of them, in turn.
        changed: Keys of the model and of terms whose files or code changed while the run was
            stopped, so that its evaluations were made or scored in different ways.
        shared: Ids of held-out prompts that are also trained on; None: not known, for a run of a
            version that did not store them.
    """

    began: str
    held_out: Digests
    training: Digests
    files: Digests
    code: Digests
    versions: Mapping[str, str]
    scorers: Mapping[str, str] = field(default_factory=dict)
    devices: str = ""
    changed: tuple[str, ...] = ()
    shared: tuple[str, ...] | None = None

    def changed_in(self, later: Provenance) -> tuple[str, ...]:
        """Keys of `changed` if the run continues with what `later` describes."""
        keys = changed_keys(self.files, later.files) + changed_keys(self.code, later.code)
        keys += changed_keys(self.scorers, later.scorers)
        # Not of what is only learnt from, such as the loss.
        scoring = [key for key in keys if key.startswith(("model.path", "reward.terms."))]
        named = (key.partition("/")[0] for key in scoring)
        return tuple(dict.fromkeys([*self.changed, *named]))

    def devices_with(self, later: Provenance) -> str:
        """`devices` if the run continues with what `later` describes."""
        return "; ".join(dict.fromkeys(filter(None, [*self.devices.split("; "), later.devices])))

    def shared_with(self, later: Provenance) -> tuple[str, ...] | None:
        """`shared` if the run continues with what `later` describes."""
        if self.shared is None or later.shared is None:
            return None
        return tuple(dict.fromkeys([*self.shared, *later.shared]))


def write_provenance(folder: RunFolder, provenance: Provenance) -> None:
    """Store the provenance of a run."""
    write_atomically(folder.origin_path, (json.dumps(asdict(provenance), indent=1) + "\n").encode())


def read_provenance(folder: RunFolder) -> Provenance | None:
    """Read the provenance of a run; None for a run of a version that did not store it."""
    path = folder.origin_path
    if not path.exists():
        return None
    with storage_errors("read", path):
        content = path.read_bytes()
    try:
        return check_stored(Provenance, content, str(path))
    except StorageError as error:
        raise StorageError(
            f"{error}, or remove it: what changed since the run began is then not noticed"
        ) from error


def changed_prompts(before: Digests, after: Digests) -> str:
    """Describe how prompts differ: how many were added, removed and changed; "" if they do not."""
    kinds = {
        "added": [name for name in after if name not in before],
        "removed": [name for name in before if name not in after],
        "changed": [
            name for name in after if name in before and _is_other(before[name], after[name])
        ],
    }
    parts = [_count(names, kind) for kind, names in kinds.items() if names]
    if not parts and list(before) != list(after):
        return "another order"
    return ", ".join(parts)


def _is_other(before: str, after: str) -> bool:
    """Whether two digests of a prompt are known to differ."""
    (prompt, _, row), (prompt_now, _, row_now) = (each.partition("-") for each in (before, after))
    return prompt != prompt_now or (bool(row and row_now) and row != row_now)


def changed_keys(before: Digests, after: Digests) -> list[str]:
    """Keys whose contents are known to differ; keys of one side alone are not."""
    return [key for key in after if before.get(key, after[key]) != after[key]]


def describe_changes(
    before: Provenance, after: Provenance, settings: Mapping[str, object]
) -> list[str]:
    """Describe what a run is trained with now, instead of what it began with.

    Args:
        settings: Values by dotted key, to name files and functions.
    """
    training = changed_prompts(before.training, after.training)
    changes = [f"data.path = {settings['data.path']}: {training}"] if training else []
    files = [
        f"{key} = {settings[key]}: other files" for key in changed_keys(before.files, after.files)
    ]
    modules: dict[str, list[str]] = {}
    for each in changed_keys(before.code, after.code):
        key, _, module = each.partition("/")
        modules.setdefault(key, []).append(module or str(settings[key]).partition(":")[0])
    code = [
        f"{key} = {settings[key]}: other code in {_list(names)}" for key, names in modules.items()
    ]
    scorers = [
        f"{key} = {settings[key]}: the scorer {after.scorers[key]} instead of {before.scorers[key]}"
        for key in changed_keys(before.scorers, after.scorers)
    ]
    return changes + files + code + scorers


def describe_mixed_scores(folder: RunFolder) -> str:
    """Say that a run's evaluations were scored in different ways; "" if they were not."""
    provenance = read_provenance(folder)
    if provenance is None or not provenance.changed:
        return ""
    return (
        f"{', '.join(provenance.changed)} changed during the run, so these scores may not be "
        f"comparable: `glm-grpo eval {shlex.quote(str(folder.path))}` scores both sides alike"
    )


def changed_versions(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Packages with another version, such as `torch 2.10.0 instead of 2.11.0`."""
    return [
        f"{name} {after.get(name, 'not installed')} instead of {before.get(name, 'not installed')}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def _count(names: list[str], kind: str) -> str:
    return f"{len(names)} {kind} ({_list(names)})"


def _list(names: list[str]) -> str:
    return ", ".join([*names[:_MOST_NAMED], *(["..."] if len(names) > _MOST_NAMED else [])])
