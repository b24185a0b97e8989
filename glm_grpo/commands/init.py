"""`glm-grpo init`: create a starter folder with a config, prompts and a README."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from glm_grpo.commands.starter_prompts import (
    held_out_objects,
    held_out_texts,
    training_objects,
    training_texts,
)
from glm_grpo.config import Config, compose_config
from glm_grpo.config.composition import OWN_CONFIG, PACKAGED_CONFIGS
from glm_grpo.errors import ConfigError
from glm_grpo.models.find import find_model
from glm_grpo.output import printable
from glm_grpo.run.folder import refuse_taken, write_atomically
from glm_grpo.tiny.embedded import EMBEDDED, SIGNS, EmbeddedModel
from glm_grpo.tiny.prompts import embedded_prompts
from rewards.images import encode_png
from rewards.types import Prompt

_TRAINING, _HELD_OUT = "prompts.jsonl", "held_out.jsonl"

_COUNTS = {_TRAINING: 24, _HELD_OUT: 16}
"""File -> number of prompts of an embedded world to write."""

_TEXT_REWARD = "text"
"""Preset for prompts that quote a text and have no targets."""

_PRESET = re.compile(r"reward=([\w-]+)")

_FOR_TEXT = re.compile(r"(?!.*_edit_).*_(\d+)gb")
"""Names of the text-to-image configs for one card, with its memory in GB."""

_WORLD_SIZE = 128
"""Side of the world's images, pixels."""

_CONFIG = """\
# Builds on the config `{name}`. Keys set here override it; key=value on the command line
# overrides both. To print all keys with their values:
#   glm-grpo train --config-dir {folder} --cfg job

defaults:
  - {name}
  - _self_
{reward}
# Prompts: .jsonl, .csv, .parquet, .txt, a folder of images, or the id of a dataset on the hub.
# ${{config_dir:}} is the folder of this file, so the paths work from any current folder.{known}
data:
  path: ${{config_dir:}}/prompts.jsonl
  eval_path: ${{config_dir:}}/held_out.jsonl

rollout:
{rollout}

# Each term is a similarity or quality; higher is better. These are the weights of the preset above,
# or of the config. On the command line, `reward=NAME` chooses another preset, and `{term}=0.5` one
# weight. Uncomment the lines to override every preset; `{term}: null` leaves a term out.
# reward:
#   terms:
{terms}

optim:
{optim}

train:
{train}
"""

_KNOWN_FORM = (
    " The embedded model knows only prompts of the form `{form}`; `config.yaml` lists the words."
)
_KNOWN_WORDS = """
#
# The embedded model knows only prompts of this form, and draws something arbitrary for any other:
#   {form}
{words}"""

_COMMENTS = {
    "prompts_per_step": "different prompts per step",
    "group_size": "images per prompt, which are compared with each other",
    "height": "pixels; the model may allow only some sizes",
    "width": "pixels",
    "learning_rate": "peak, reached after the warm-up",
    "steps": "one rollout and its updates each",
    "seed": "determines prompts and random numbers",
    "eval_every": "steps between evaluations on the held-out prompts",
    "checkpoint_every": "steps between checkpoints",
}
"""Keys of three sections that the written config shows."""

_README = """\
# {title}

Written by `glm-grpo init`. `config.yaml` builds on `{name}`, one of the configs in `{configs}`.

1. Put your prompts into `prompts.jsonl` and `held_out.jsonl`: {fields}.{known}
2. Check: `glm-grpo check --config-dir {folder}`
3. Train: `glm-grpo train --config-dir {folder}`; Ctrl-C saves, `train.resume=auto` continues.
4. Look: `glm-grpo gallery RUN --serve`, where RUN is `outputs/DATE/TIME`.
5. Try other weights: `glm-grpo rescore RUN {term}=0.5`
6. Use it: `glm-grpo export RUN my-model` writes the trained weights and a page for the hub.
"""

_FIELDS = "`prompt`, and optionally `target` (the image you want) and `text` (to be rendered)"
_OBJECT_FIELDS = (
    "`prompt`, and for the term `composition` what the image should show, in GenEval's form: "
    "`include`, and optionally `exclude` and `tag`"
)
_EDIT_FIELDS = "`prompt`, `source` (the image to edit), and optionally `target` (the result)"


def parse_preset(overrides: Sequence[str]) -> str | None:
    """Parse `reward=PRESET`, the only override of `init`; None if there is none."""
    matches = [_PRESET.fullmatch(word) for word in overrides]
    others = [word for word, match in zip(overrides, matches, strict=True) if match is None]
    if others or len(matches) > 1:
        raise ConfigError(
            f"{' '.join(others or overrides)}: init takes one override, reward=PRESET; set other "
            f"keys in {OWN_CONFIG}.yaml of the new folder"
        )
    return matches[0][1] if matches and matches[0] else None


def init_folder(folder: Path, name: str, reward: str | None = None) -> Iterator[Path]:
    """Write a config that builds on a packaged one, prompts and a README; yields their paths.

    An embedded model gets prompts of its world with their images as targets; for edits with any
    other model they show the format. Text-to-image with any other model gets natural prompts:
    prompts that quote a text if a term of the reward reads one, else prompts about objects, with
    what an image should show.

    Args:
        folder: New or empty.
        name: Config to build on.
        reward: Preset of rewards; None: that of the config, or the one for texts if the model draws
            these and the prompts have no targets.
    """
    # These prompts replace whatever the config asks for.
    paths = [f"data.path={_TRAINING}", f"data.eval_path={_HELD_OUT}"]
    config = compose_config(None, name, paths)
    embedded = EMBEDDED.get(config.model.path)
    is_natural = embedded is None and not config.data.sources
    if reward is None and is_natural and find_model(config.model.path).family.TEXT_RULE is not None:
        reward = _TEXT_REWARD
    if reward is not None:
        config = compose_config(None, name, [*paths, f"reward={reward}"])
    refuse_taken(folder)
    if is_natural:
        training, held_out = (
            (_plain(training_texts()), _plain(held_out_texts()))
            if any("text" in term.needs() for term in config.reward.terms.values())
            else (training_objects(), held_out_objects())
        )
        yield _write_rows(folder / _TRAINING, training)
        yield _write_rows(folder / _HELD_OUT, held_out)
    else:
        sets = (embedded or SIGNS).prompt_sets
        for (file, count), set_name in zip(_COUNTS.items(), sets, strict=True):
            yield _write_prompts(folder, file, set_name, count, sources=config.data.sources)
    described = _describe_config(folder, name, config, embedded, reward=reward)
    yield _write(folder / f"{OWN_CONFIG}.yaml", described)
    is_edit = config.data.sources > 0
    readme = _README.format(
        title=printable(folder.resolve().name),
        folder=_quoted(folder),
        name=name,
        known=""
        if embedded is None
        else _KNOWN_FORM.format(form=embedded.known_form(is_edit=is_edit)),
        configs=PACKAGED_CONFIGS,
        term=_example_term(config),
        fields=_describe_fields(config),
    )
    yield _write(folder / "README.md", readme)


def propose_configs() -> str:
    """Say what the machine has, and which packaged configs train published models on it."""
    written = "this folder builds on `tiny`, the embedded model"
    if not torch.cuda.is_available():
        return f"this machine has no GPU: {written}, which trains on the CPU"
    memory = torch.cuda.get_device_properties(0).total_memory
    named = f"{torch.cuda.get_device_name(0)} with {memory / 1e9:.0f} GB"
    if (count := torch.cuda.device_count()) > 1:
        named = f"{count} GPUs, the first {named}"
    sizes: dict[int, list[str]] = {}
    for path in sorted(PACKAGED_CONFIGS.glob("*gb.yaml")):
        if match := _FOR_TEXT.fullmatch(path.stem):
            sizes.setdefault(int(match[1]), []).append(path.stem)
    fitting = [size for size in sizes if size * 10**9 <= memory]
    if not fitting:
        least = f"published models need {min(sizes)} GB or more"
        return f"this machine has {named}: {written}; {least}"
    names = " or ".join(sizes[max(fitting)])
    return (
        f"this machine has {named}: {written}; to train published weights: glm-grpo init DIR "
        f"--config-name {names}"
    )


def _describe_fields(config: Config) -> str:
    if config.data.sources:
        return _EDIT_FIELDS
    return _FIELDS if "ocr" in config.reward.terms else _OBJECT_FIELDS


def _example_term(config: Config) -> str:
    terms = config.reward.terms
    return "ocr" if "ocr" in terms else max(terms, key=lambda name: terms[name].weight)


def _quoted(folder: Path) -> str:
    return shlex.quote(printable(str(folder)))


def _write_prompts(folder: Path, file: str, set_name: str, count: int, *, sources: int) -> Path:
    set_name = f"edit-{set_name}" if sources else set_name
    prompts = embedded_prompts(
        set_name, height=_WORLD_SIZE, width=_WORLD_SIZE, sources=min(sources, 1)
    )
    # Spread over the set, whose kinds of prompts may follow each other.
    rows = [index * len(prompts) // count for index in range(count)]
    return _write_rows(folder / file, [_write_prompt(folder, prompts[row]) for row in rows])


def _plain(prompts: Iterable[str]) -> list[dict[str, Any]]:
    return [{"prompt": prompt} for prompt in prompts]


def _write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    return _write(path, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))


def _write_prompt(folder: Path, prompt: Prompt) -> dict[str, Any]:
    row: dict[str, Any] = {"id": prompt.prompt_id, "prompt": prompt.prompt}
    if prompt.texts:
        row["text"] = prompt.texts[0]
    row |= prompt.metadata
    images = [("target", prompt.target), *(("source", source) for source in prompt.sources)]
    for name, pixels in images:
        if pixels is not None:
            row[name] = f"images/{prompt.prompt_id}-{name}.png"
            write_atomically(folder / row[name], encode_png(pixels))
    return row


def _write(path: Path, content: str) -> Path:
    write_atomically(path, content.encode())
    return path


def _describe_config(
    folder: Path, name: str, config: Config, embedded: EmbeddedModel | None, *, reward: str | None
) -> str:
    terms = [
        f"#     {term}: {{weight: {given.weight:g}}}" for term, given in config.reward.terms.items()
    ]
    return _CONFIG.format(
        folder=_quoted(folder),
        name=name,
        reward="" if reward is None else f"  - override reward: {reward}\n",
        known=""
        if embedded is None
        else _KNOWN_WORDS.format(
            form=embedded.known_form(is_edit=config.data.sources > 0),
            words="\n".join(f"# {line}" for line in embedded.words),
        ),
        rollout=_describe_section(config.rollout),
        terms="\n".join(terms),
        term=_example_term(config),
        optim=_describe_section(config.optim),
        train=_describe_section(config.train),
    )


def _describe_section(section: BaseModel) -> str:
    """Format the shown keys of a section, one per line, with values and comments."""
    values = section.model_dump()
    lines = [f"  {key}: {values[key]:g}" for key in _COMMENTS if key in values]
    width = max(map(len, lines))
    comments = (comment for key, comment in _COMMENTS.items() if key in values)
    return "\n".join(
        f"{line:<{width}}  # {comment}" for line, comment in zip(lines, comments, strict=True)
    )
