"""Generate reference pages: config keys, commands, and names in other trainers.

python -m tools.site.reference     writes them; a test fails if they are out of date
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from glm_grpo.cli import make_parser
from glm_grpo.config import Config, compose_config
from glm_grpo.config.load import flatten
from glm_grpo.config.losses import LOSSES, LossSettings
from glm_grpo.config.other_trainers import COUNTERPARTS
from rewards.base import TermConfig
from rewards.config import RewardConfig
from rewards.options import may_change
from rewards.terms import KINDS
from rewards.terms.ocr import OCR_ENGINES, OcrConfig

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"

_SHOWN_CONFIGS = {
    "tiny": (),
    "glm_image_80gb": ("data.path=prompts.jsonl", "data.eval_path=held_out.jsonl"),
}
"""Configs whose values are shown with each key, and the overrides that they need."""

_DATED = "outputs/DATE/TIME"
"""Shown for the folder of a run, which configs name by the start time."""

_TYPES = {bool: "true or false", int: "whole number", float: "number", str: "text"}
_BOUNDS: dict[type, str] = {
    annotated_types.Ge: "ge",
    annotated_types.Gt: "gt",
    annotated_types.Le: "le",
    annotated_types.Lt: "lt",
}
_WORDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_LARGEST_SHOWN = 10**12
"""Larger bounds only mark the end of arithmetic, so the page omits them."""

_CONFIG_HEAD = """# Config keys

Look up every config key. Set a key in a YAML file, or on the command line as `key=value`
(`+key=value` if no file has it). The line below each key gives its type, range and default, and its
value in `tiny` and `glm_image_80gb` if that differs.
[Choose settings](../configuration.md) lists the most important keys.

<!-- Written by `python -m tools.site.reference`; edit the text below the fields instead. -->
"""

_TRAINERS_HEAD = """# Names in other trainers

Find the key for a setting that you know from TRL (`GRPOConfig`, and peft's `LoraConfig`), flow_grpo
(`config/base.py`) or verl (`ppo_trainer.yaml`, where most are below `actor_rollout_ref`). If you
use one of their names in a config or an override, the error gives the key of the first column.
`temperature`, `top_p`, `top_k` and `min_p` have the same names below `rollout`; turn the last three
off with `null`, not with 1, 0 or -1.

<!-- Written by `python -m tools.site.reference`; edit config/other_trainers.py instead. -->

| here | TRL | flow_grpo | verl | what differs |
|---|---|---|---|---|
"""

_COMMANDS_MARK = (
    "<!-- Written by `python -m tools.site.reference`; edit glm_grpo/cli.py instead. -->"
)


def config_page() -> str:
    """Write the page of all config keys."""
    shown = {
        name: flatten(
            compose_config(ROOT / "configs", name, [*overrides, f"run_dir={_DATED}"]).model_dump(
                mode="json"
            )
        )
        for name, overrides in _SHOWN_CONFIGS.items()
    }
    lines = [_CONFIG_HEAD]
    for name, field in Config.model_fields.items():
        key = field.alias or name
        if name == "reward":
            lines += _reward_section(shown)
        elif name == "loss":
            lines += _loss_section(shown)
        elif (section := _section_of(field)) is not None:
            lines += _section(f"## {key}", key, section, shown)
        else:
            lines += [f"## {key}\n", *_entry(key, field, shown, heading="####")]
    return "\n".join(lines).rstrip() + "\n"


def commands_section() -> str:
    """Write the part of the commands page that follows from the parser."""
    parser = make_parser()
    (subparsers,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    lines = [_COMMANDS_MARK]
    for choice in subparsers._choices_actions:
        command = subparsers.choices[choice.dest]
        lines += [f"\n### glm-grpo {choice.dest}\n", f"{_sentence(choice.help)}\n"]
        if command.epilog:
            examples = [line.strip() for line in command.epilog.splitlines()[1:]]
            lines += ["```bash", *examples, "```\n"]
        actions = [action for action in command._actions if action.dest != "help"]
        if actions:
            lines += ["| argument | meaning |", "|---|---|"]
        lines += [f"| `{_written(action)}` | {_meaning(action)} |" for action in actions]
    return "\n".join(lines) + "\n"


def trainers_page() -> str:
    """Write the page of names in other trainers."""
    lines = []
    for each in COUNTERPARTS:
        columns = (each.ours or "", each.trl, each.flow_grpo, each.verl)
        names = [", ".join(f"`{name}`" for name in column.split()) for column in columns]
        lines.append(f"| {' | '.join([names[0] or 'nothing to set', *names[1:], each.note])} |")
    return _TRAINERS_HEAD + "\n".join(lines) + "\n"


def _sentence(text: str | None) -> str:
    text = (text or "").strip()
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _written(action: argparse.Action) -> str:
    """Format an option as one types it, escaping the bars of a table."""
    value = action.metavar or (
        None if action.choices is None else f"{{{','.join(action.choices)}}}"
    )
    if not action.option_strings:
        return f"{value or action.dest}{' ...' if action.nargs in ('*', '+') else ''}"
    option = action.option_strings[0]
    if action.nargs == 0:
        return option
    return f"{option} {value or action.dest.upper()}{' ...' if action.nargs in ('*', '+') else ''}"


def _meaning(action: argparse.Action) -> str:
    help_text = action.help
    if help_text is None:
        help_text = {
            "overrides": "config keys, as for `train.py`",
            "config_dir": "folder with configs",
        }.get(action.dest, "")
        if action.option_strings and action.default is not None:
            help_text += f" ({action.default})"
    return help_text.replace("|", "\\|").strip()


def _reward_section(shown: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = _section("## reward", "reward", RewardConfig, shown, leave_out={"terms"})
    lines += [
        "## reward.terms\n",
        "A term is active if its section is present; set it to `null` to remove it. Every term has "
        "these keys, where `<name>` is its kind or a name of your own:\n",
    ]
    common = TermConfig.model_fields
    for name, field in common.items():
        lines += _entry(f"reward.terms.<name>.{name}", field, {}, heading="####")
    for kind, term in KINDS.items():
        forms = OCR_ENGINES if term is OcrConfig else {"": term}
        for engine, form in forms.items():
            title = f"{kind}, engine {engine}" if engine else kind
            lines += [f"### Term {title}\n", f"{_first_line(form)}\n"]
            for name, field in form.model_fields.items():
                if name not in common and name != "kind":
                    key = f"reward.terms.{kind}.{name}"
                    lines += _entry(key, field, shown, heading="####")
    return lines


def _loss_section(shown: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = [
        "## loss\n",
        "The loss to minimise. `loss=NAME` on the command line selects a preset from "
        "`configs/loss`. All kinds share these keys:\n",
    ]
    lines += [
        "#### `loss.kind`\n",
        f"*{', '.join(f'`{kind}`' for kind in LOSSES)}*\n",
        "Kind of loss.\n",
    ]
    common = LossSettings.model_fields
    for name, field in common.items():
        lines += _entry(f"loss.{name}", field, shown, heading="####")
    written: set[str] = {"kind"}
    for kind, form in LOSSES.items():
        lines += [f"### Loss {kind}\n", f"{_first_line(form)}\n"]
        own = {name: each for name, each in form.model_fields.items() if name not in common}
        told = [f"`loss.{name}`" for name in own if name in written and name != "kind"]
        for name, field in own.items():
            if name not in written:
                lines += _entry(f"loss.{name}", field, shown, heading="####")
        if told:
            lines.append(f"Also, as above: {', '.join(told)}.\n")
        written |= {*own}
    return lines


def _section(
    title: str,
    key: str,
    section: type[BaseModel],
    shown: Mapping[str, Mapping[str, Any]],
    leave_out: frozenset[str] | set[str] = frozenset(),
) -> list[str]:
    lines = [f"{title}\n", f"{_first_line(section)}\n"]
    for name, field in section.model_fields.items():
        if name in leave_out:
            continue
        path, inner = f"{key}.{field.alias or name}", _section_of(field)
        lines += _entry(path, field, shown, heading="####")
        if inner is not None:
            for below, option in inner.model_fields.items():
                lines += _entry(f"{path}.{below}", option, shown, heading="####")
    return lines


def _entry(
    key: str, field: FieldInfo, shown: Mapping[str, Mapping[str, Any]], *, heading: str
) -> list[str]:
    facts = [_describe_type(field)]
    default = field.get_default()
    if field.default_factory is None and default is not PydanticUndefined:
        facts.append(f"default: {_value(default)}")
    facts += [
        f"{name}: {_value(values[key])}"
        for name, values in shown.items()
        if key in values and _value(values[key]) != _value(default)
    ]
    if may_change(field):
        facts.append("may change on resume")
    text = inspect.cleandoc(field.description or "")
    return [
        f"{heading} `{key}`\n",
        f"*{' · '.join(facts)}*\n",
        f"{text}\n",
    ]


def _describe_type(field: FieldInfo) -> str:
    bounds = [*field.metadata]
    words = list(dict.fromkeys(_type_words(field.annotation, bounds)))
    is_optional = "null" in words
    words = [word for word in words if word != "null"]
    text = ", ".join(words[:-1]) + (" or " if len(words) > 1 else "") + words[-1]
    return f"{text}{_describe_bounds(bounds)}{', or null' if is_optional else ''}"


def _type_words(annotation: Any, bounds: list[Any]) -> Iterator[str]:
    origin = get_origin(annotation)
    if origin is Literal:
        yield from (f"`{each}`" for each in get_args(annotation))
    elif origin is Annotated:
        inner, *metadata = get_args(annotation)
        for each in metadata:
            bounds.extend(each.metadata if isinstance(each, FieldInfo) else [each])
        yield from _type_words(inner, bounds)
    elif origin in (Union, UnionType):
        for each in get_args(annotation):
            yield from _type_words(each, bounds)
    elif origin is tuple:
        yield "list"
    elif annotation is NoneType:
        yield "null"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "section"
    else:
        yield _TYPES[annotation]


def _describe_bounds(metadata: list[Any]) -> str:
    bounds = {
        name: f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"
        for rule in metadata
        for kind, name in _BOUNDS.items()
        if isinstance(rule, kind) and abs(limit := getattr(rule, name)) <= _LARGEST_SHOWN
    }
    if {*bounds} == {"ge", "le"}:
        found = [f"{bounds['ge']} to {bounds['le']}"]
    else:
        found = [f"{_WORDS[name]} {limit}" for name, limit in bounds.items()]
    for rule in metadata:
        if isinstance(rule, annotated_types.MultipleOf):
            found.append(f"a multiple of {rule.multiple_of}")
    return "".join(f", {each}" for each in found)


def _value(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "`null`" if value is None else f"`{str(value).lower()}`"
    if isinstance(value, tuple | list):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{' '.join(str(value).split())}`"


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    for each in (field.annotation, *get_args(field.annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def _first_line(section: type) -> str:
    return inspect.cleandoc(section.__doc__ or "").partition("\n\n")[0]


def pages() -> dict[Path, str]:
    """Generated contents by the file they belong to; hand-written parts are kept."""
    commands = REFERENCE / "commands.md"
    written_by_hand = commands.read_text().partition(_COMMANDS_MARK)[0]
    return {
        REFERENCE / "config.md": config_page(),
        commands: written_by_hand + commands_section(),
        REFERENCE / "other_trainers.md": trainers_page(),
    }


if __name__ == "__main__":
    for file, text in pages().items():
        file.write_text(text)
