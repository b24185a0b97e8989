"""Every key of the config at its bounds, beyond them, and with values of other types.

The keys are those of the pydantic models, so that a new one is tried too. Whatever is written, it
is refused in words that name the key, or gives a config from which a run's settings can be built.

Set GLM_GRPO_SWEEP_EXAMPLES to try as many generated examples, and each listed value for every key;
as a rule a key is tried at its bounds and with some of the listed values, others with other keys.
"""

from __future__ import annotations

import copy
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from glm_grpo.builders.asynchronous import collector_needs
from glm_grpo.builders.models import build_planner
from glm_grpo.builders.prompts import build_batch, build_evaluation_batches
from glm_grpo.builders.settings import collect_settings, loop_settings, update_settings
from glm_grpo.builders.trainer import build_learning_rate
from glm_grpo.config import (
    Config,
    compose_config,
    config_differences,
    effective_config,
    from_yaml,
    to_yaml,
    validate_config,
)
from glm_grpo.errors import ConfigError, DataError
from glm_grpo.plan.fit import ConfigPlanner
from glm_grpo.training.data.entries import PromptEntry
from glm_grpo.training.data.prompts import PromptSet
from rewards.problems import _walk_fields
from rewards.terms import KINDS
from rewards.terms.ocr import OCR_ENGINES
from tests.generated import GENERATED

EXAMPLES = int(os.environ.get("GLM_GRPO_SWEEP_EXAMPLES", "0"))
# Far above what any value takes, on a busy machine too: a hang is found, not slowness.
LONGEST_SECONDS = 60.0
ROOT = Path(__file__).resolve().parents[2]

NEEDED = {
    "url": "http://127.0.0.1:8700",
    "function": "scores:brightness",
    "weight": 0.1,
}
"""Options that a term must have, where no plain word will do."""

pytestmark = pytest.mark.timeout(300 + EXAMPLES)


@pytest.fixture(scope="module")
def base() -> dict[str, Any]:
    """The values of `configs/tiny.yaml`."""
    config = compose_config(ROOT / "configs", "tiny", ["run_dir=run"])
    values: dict[str, Any] = config.model_dump(mode="json")
    return values


@pytest.fixture(autouse=True)
def nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert [*tmp_path.iterdir()] == []


def fields() -> dict[str, FieldInfo]:
    """By dotted key; options of a term under the name of its kind."""
    found = dict(_walk_fields(Config))
    for kind, term in KINDS.items():
        assert f"reward.terms.{kind}.weight" in found, term
    return found


FIELDS = fields()
PROMPTS = PromptSet(
    "prompts.txt",
    tuple(PromptEntry(f"line {n}", f"{n:05d}", "a circle", (), None) for n in range(100)),
    height=128,
    width=128,
)
COUNTS: Counter[str] = Counter()
_STRIDE = 67
"""Every so many of the listed values are tried for a key; the next key begins with another one."""


def with_value(base: dict[str, Any], changes: dict[str, object]) -> dict[str, Any]:
    """The values with some keys set, in sections that are there for it."""
    values = copy.deepcopy(base)
    for key, value in changes.items():
        *sections, name = key.split(".")
        section: Any = values
        for depth, part in enumerate(sections):
            path = ".".join(sections[: depth + 1])
            if not isinstance(section.get(part), dict) or is_of_another_engine(path, name, section):
                section[part] = least_section(path, name)
            section = section[part]
        section[name] = value
    return values


def is_of_another_engine(key: str, option: str, terms: dict[str, Any]) -> bool:
    """Whether an option is one of the OCR engines that the base does not use."""
    return key == "reward.terms.ocr" and (
        option not in OCR_ENGINES[terms["ocr"]["engine"]].model_fields
    )


def least_section(key: str, option: str) -> dict[str, object]:
    """A section that is absent from the base, with what it needs."""
    if key == "model.adapter":
        return {"rank": 4, "alpha": 8.0}
    kind = key.rpartition(".")[2]
    form: type[BaseModel] = KINDS[kind]
    chosen = {"kind": kind}
    if kind == "ocr":
        engines = (name for name, each in OCR_ENGINES.items() if option in each.model_fields)
        chosen["engine"] = next(engines)
        form = OCR_ENGINES[chosen["engine"]]
    needed = {name for name, field in form.model_fields.items() if field.is_required()}
    return {name: NEEDED.get(name, "x") for name in needed} | chosen


def types_of(annotation: object) -> set[object]:
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    if get_origin(annotation) in (Union, UnionType, Annotated, tuple):
        return {each for part in get_args(annotation) for each in types_of(part)}
    return {annotation}


def bounds_of(key: str) -> list[object]:
    """On, just inside and just outside each bound of a field; and its choices."""
    found: list[object] = []
    kinds = types_of(FIELDS[key].annotation)
    for rule in FIELDS[key].metadata:
        for name in ("ge", "gt", "le", "lt", "multiple_of"):
            bound = getattr(rule, name, None)
            if bound is None or isinstance(rule, annotated_types.Len):
                continue
            if int in kinds:
                found += [bound - 1, bound, bound + 1, bound * 2]
            else:
                found += [float(bound), math.nextafter(bound, math.inf)]
                found += [math.nextafter(bound, -math.inf), bound * 2.0]
    return [*found, *(kind for kind in kinds if isinstance(kind, str))]


def nested(depth: int, value: object) -> object:
    for _ in range(depth):
        value = [value]
    return value


NUMBERS: list[object] = [
    *(0, 1, 2, 3, 7, 32, 64, 100, 1000, 1024, 65_536, 10**6, 32 * 10**6, 10**9, 10**18),
    *(2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 32 * 10**30, 10**30, 10**400),
    *(-1, -32, -(2**63), -(10**30), int("f" * 5_000, 16), True, False),
    *(0.0, -0.0, 0.5, 1.0, 8.0, 1e-12, 1e-30, 1e-38, 1e-45, 1e-300, 5e-324, 1e6, 1e12, 1e30),
    *(3.5e38, 1e300, 1.7e308, -1e-300, -1.0, -1e30, math.nan, math.inf, -math.inf),
]
TEXTS: list[object] = [
    *(
        "",
        " ",
        "x",
        "tiny",
        "auto",
        "null",
        "nan",
        "1",
        "1e3",
        "true",
        "???",
        "\0",
        "a\0b",
        "\ud800",
    ),
    *(
        "caf\udce9",
        "\x1b[31m",
        "\u202e",
        "\n",
        "é",
        "模型",
        "/",
        "..",
        "~",
        "-",
        "--help",
        "${run_dir}",
    ),
    *("x" * 256, "x" * 5_000, "x/" * 3_000, "é" * 3_000, "x" * 200_000, "http://", "http://["),
    *("http://a:99999", "http://a:b", "here:65536", "here:0", "a:b", "a.b:c", "A", "HOME"),
    *("{", "{prompt}", "{lowest", "{0.__class__}", "%s", "sk-" + "1" * 20),
]
OTHERS: list[object] = [
    None,
    *(
        [],
        [1],
        ["x"],
        ["x", "x"],
        [None],
        [[]],
        [0.9, 0.99],
        [1e-300, 0.5],
        [math.nan, 0.5],
        ["\0"],
    ),
    *(["\ud800"], ["x" * 5_000], [10**30, 0.5], ["x"] * 1_000, {}, {"x": 1}, {"weight": 1.0}),
    *({"": 1}, {"\ud800": 1}, {1: 1}, {None: 1}, {"a": {"b": {"c": 1}}}, nested(60, 1)),
    *(nested(900, 1), b"x", (1, 2), {1, 2}, object()),
]


def use(config: Config) -> None:
    """What is worked out of a config before and while a run of it goes on, without its models."""
    assert from_yaml(to_yaml(config)) == config
    assert config_differences(config, config) == []
    json.dumps(config.model_dump(mode="json"), allow_nan=False)
    config = effective_config(config).config
    loop_settings(config)
    collector_needs(config)
    rows = torch.arange(config.rollout.prompts_per_step)
    rows.split(collect_settings(config).micro_batch_size)
    rows.split(update_settings(config).micro_batch_size)
    update(config)
    sets = torch.Generator()
    batches = build_evaluation_batches(config, PROMPTS)
    for step in (0, config.train.steps - 1):
        if config.rollout.prompts_per_step > len(PROMPTS):
            with pytest.raises(DataError, match="rollout.prompts_per_step"):
                build_batch(config, PROMPTS, step)
        else:
            batches.append(build_batch(config, PROMPTS, step))
    for batch in batches:
        for seed in (batch.seed, *batch.decode_seeds):
            sets.manual_seed(seed)


def update(config: Config) -> None:
    """An optimizer's first and last step, in float32."""
    weight = torch.nn.Parameter(torch.tensor([0.5]))
    optimizer = torch.optim.AdamW(
        [weight],
        lr=config.optim.learning_rate,
        betas=config.optim.betas,
        eps=config.optim.epsilon,
        weight_decay=config.optim.weight_decay,
    )
    rate = build_learning_rate(config, optimizer)
    for updates in (0, 1, config.train.steps * config.train.updates_per_rollout):
        rate.set(updates)
        assert 0 <= optimizer.param_groups[0]["lr"] <= config.optim.learning_rate
        rate.set(0)
    weight.grad = torch.tensor([0.25])
    torch.nn.utils.clip_grad_norm_([weight], config.optim.max_grad_norm)
    optimizer.step()
    assert weight.isfinite().all()
    for factor in (config.loss.kl_coef, config.loss.clip_high, 1 / config.rollout.temperature):
        assert (torch.tensor(1.0) * factor).square().isfinite()
    for name, term in config.reward.terms.items():
        assert (torch.tensor(1.0) * term.weight).square().isfinite(), name


def is_named(key: str, message: str) -> bool:
    """By its section and its own name; a rule between two keys of a section has that once."""
    return all(part in message for part in key.rpartition("."))


def try_values(values: object, keys: list[str]) -> None:
    """A config that can be used, or an error that names the key: nothing else, and in no time."""
    start = time.process_time()
    COUNTS["tried"] += 1
    config, message = None, ""
    try:
        config = validate_config(values)
    except ConfigError as error:
        message = str(error)
    if config is not None:
        use(config)
    else:
        COUNTS["refused"] += 1
        assert any(is_named(key, message) for key in keys), message
        assert len(message) < 5_000 * len(keys)
    assert time.process_time() - start < LONGEST_SECONDS


@pytest.mark.parametrize("key", FIELDS)
def test_every_value_of_a_key_is_used_or_refused_by_its_name(
    base: dict[str, Any], key: str
) -> None:
    listed, start = [*NUMBERS, *TEXTS, *OTHERS], [*FIELDS].index(key)
    some = listed if EXAMPLES else listed[start % _STRIDE :: _STRIDE]
    for value in (*bounds_of(key), *some):
        try_values(with_value(base, {key: value}), [key])


def test_the_sections_of_the_sweep_are_valid(base: dict[str, Any]) -> None:
    # Else all of their keys would be refused for another's fault.
    for key, field in FIELDS.items():
        if not field.is_required() and key.count(".") > 1:
            validate_config(with_value(base, {key: field.get_default(call_default_factory=True)}))


LISTED = [*NUMBERS, *TEXTS, *OTHERS]

VALUES = st.recursive(
    # By its place: hypothesis prints the values of a strategy, and some are too long for that.
    st.integers(0, len(LISTED) - 1).map(lambda place: LISTED[place])
    | st.integers()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


@st.composite
def changes(draw: st.DrawFn, most: int) -> dict[str, object]:
    keys = draw(st.lists(st.sampled_from([*FIELDS]), min_size=1, max_size=most, unique=True))
    return {
        key: draw(st.sampled_from(bounds_of(key)) | VALUES if bounds_of(key) else VALUES)
        for key in keys
    }


@settings(GENERATED, max_examples=EXAMPLES or 80)
@given(changed=changes(most=3))
def test_generated_values_of_several_keys_are_used_or_refused(
    base: dict[str, Any], changed: dict[str, object]
) -> None:
    # A section that is no section has no keys.
    keys = [key for key in changed if not any(key.startswith(f"{each}.") for each in changed)]
    try_values(with_value(base, {key: changed[key] for key in keys}), keys)


def as_written(value: object) -> str:
    """A value as one types it behind key=."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return hex(value) if abs(value) > 10**400 else str(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_written, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}: {as_written(each)}" for key, each in value.items()) + "}"
    return "null" if value is None else str(value).lower()


@settings(GENERATED, max_examples=max(EXAMPLES // 10, 15))
@given(changed=changes(most=1))
def test_generated_overrides_are_used_or_refused(changed: dict[str, object]) -> None:
    ((key, value),) = changed.items()
    start = time.process_time()
    COUNTS["overrides tried"] += 1
    override = f"++{key}={as_written(value)}"
    config, message = None, ""
    try:
        config = compose_config(ROOT / "configs", "tiny", [override])
    except ConfigError as error:
        message = str(error)
    if config is not None:
        use(config)
    else:
        COUNTS["overrides refused"] += 1
        # A term that is made of one option lacks others, and those are named.
        assert key.rpartition(".")[0] in message or "cannot be composed" in message
        assert len(message) < 5_000 + 2 * len(override)
    assert time.process_time() - start < LONGEST_SECONDS


SIZES = [
    *("rollout.prompts_per_step", "rollout.group_size", "train.micro_batch_size"),
    *("decode.batch_size", "model.adapter.rank"),
]
"""Whose largest values are planned as soon as small ones."""


@pytest.mark.parametrize("key", SIZES)
def test_a_run_of_the_largest_size_is_planned(base: dict[str, Any], key: str) -> None:
    bounds: list[Any] = [
        rule.le for rule in FIELDS[key].metadata if isinstance(rule, annotated_types.Le)
    ]
    largest = min(bounds, default=2**63 - 1)
    config = validate_config(with_value(base, {key: largest}))
    planner = ConfigPlanner(build_planner("tiny"), prompt_tokens=64, is_on_accelerator=True)
    plan = planner.plan(config)
    assert plan.peak > 0
    assert plan.peak >= planner.plan(validate_config(base)).peak


def test_the_sweep_says_how_many_it_tried() -> None:
    print(dict(COUNTS))  # noqa: T201
    assert not COUNTS or 0 < COUNTS["refused"] < COUNTS["tried"] or "tried" not in COUNTS
