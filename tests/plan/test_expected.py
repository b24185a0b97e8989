"""What a step probably takes, and cards that are named by their memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import pytest
import torch

from glm_grpo.commands.plan import describe_duration, expected_line, plan_config
from glm_grpo.config import Config, compose_config
from glm_grpo.errors import ModelError
from glm_grpo.models.planning import Parallelism
from glm_grpo.plan.devices import DEVICES, Hardware, hardware_with
from glm_grpo.plan.expected import cheaper_configs, expected_seconds
from glm_grpo.plan.floors import PhaseFloor
from glm_grpo.setup.hints import hint_at_bfloat16
from tests.factories import CONFIG_DIR, tiny_config

FLOORS: Mapping[str, PhaseFloor] = {
    phase: PhaseFloor(seconds)
    for phase, seconds in {"rollout": 5.0, "decode": 40.0, "update": 2.5, "offload": 1.0}.items()
}
PROMPTS = ("data.path=prompts.txt", "data.eval_path=held_out.txt")


def lines_of_plan(name: str, hardware: Hardware, *overrides: str) -> Iterator[str]:
    """The lines of a plan, without its table."""
    parts = plan_config(
        compose_config(CONFIG_DIR, name, [*PROMPTS, *overrides]),
        memory=None,
        prompt_tokens=None,
        hardware=hardware,
        parallelism=Parallelism(1, is_sharded=False, is_mixed=False),
    )
    return (part for part in parts if isinstance(part, str))


def plan(name: str, hardware: Hardware, *overrides: str) -> list[str]:
    return [*lines_of_plan(name, hardware, *overrides)]


@pytest.mark.parametrize(
    ("overrides", "seconds"),
    [
        # 5 x 3.6 + 40 x 2 + 2.5 x 3.6 + 1 x 1.2.
        ((), 108.2),
        # 8-bit decoders are not compiled: 40 x 3.
        (("decode.quantization=float8",), 148.2),
        (("decode.compile=false",), 148.2),
    ],
)
def test_a_step_takes_as_many_times_its_floor_as_the_measured_one(
    overrides: tuple[str, ...], seconds: float
) -> None:
    assert expected_seconds(tiny_config(*overrides), FLOORS) == pytest.approx(seconds)


def test_an_expectation_comes_with_its_ground() -> None:
    # 108.2 / 48.5; 40 steps of 108.2 s are 1.2 hours.
    line = expected_line(tiny_config("train.steps=40"), FLOORS)
    assert line.startswith("expect about 108 s, 2.2 times as long, judging by a step of GLM-Image")
    assert "; 40 steps: 72 minutes, without scores" in line


def test_durations_have_two_digits() -> None:
    assert [describe_duration(seconds) for seconds in (90, 7_200, 80_000, 120_000, 900_000)] == [
        "1.5 minutes",
        "2.0 hours",
        "22 hours",
        "1.4 days",
        "10 days",
    ]


def test_cheaper_settings_add_up_and_skip_those_that_are_cheap_already() -> None:
    def changes(config: Config) -> list[tuple[str, int | None, int]]:
        return [
            (words, each.decode.rollout_steps, each.rollout.group_size)
            for words, each in cheaper_configs(config)
        ]

    fewer = "decode.rollout_steps=4"
    assert changes(tiny_config("decode.steps=20", "rollout.group_size=8")) == [
        (fewer, 4, 8),
        (f"{fewer} rollout.group_size=4", 4, 4),
    ]
    cheap = ("decode.steps=20", "decode.rollout_steps=4", "rollout.group_size=8")
    assert changes(tiny_config(*cheap)) == [("rollout.group_size=4", 4, 4)]
    # Nothing is sampled or decoded.
    assert changes(tiny_config("decode.steps=20", "train.method=sft")) == []


def test_a_long_run_is_told_what_makes_it_shorter() -> None:
    lines = plan("glm_image_24gb", Hardware([DEVICES["rtx4090"]], 24 * 10**9))
    (expected,) = (line for line in lines if line.startswith("expect about"))
    assert "200 steps: 1.4 days" in expected
    assert [line.split(":")[0] for line in lines if line.startswith("  with")] == [
        "  with decode.rollout_steps=4",
        "  with decode.rollout_steps=4 rollout.group_size=4",
    ]
    assert lines[-1].startswith("it fits")


def test_a_card_by_its_memory_stands_for_all_with_as_much() -> None:
    lines = plan("janus_pro_1b_16gb", hardware_with(16 * 10**9))
    for name in ("RTX 4060 Ti 16GB", "RTX 4080", "T4", "V100 SXM2"):
        assert any(line.startswith("a step takes at least") and name in line for line in lines)
    # Of these, two have no bfloat16.
    told = [line for line in lines if "set model.dtype=float16" in line]
    assert [name in line for name, line in zip(("T4", "V100"), told, strict=True)] == [True, True]
    assert lines[-1].startswith("it fits")


@pytest.mark.parametrize(
    ("words", "card", "packaged"),
    [
        ("glm_image_80gb", 16, "glm_image_16gb"),
        ("glm_image_80gb", 24, "glm_image_24gb"),
        ("glm_image_edit_80gb", 24, "glm_image_edit_24gb"),
        ("janus_pro_1b_24gb", 16, "janus_pro_1b_16gb"),
        # It is in use already.
        ("janus_pro_1b_16gb rollout.batch_size=64 train.micro_batch_size=64", 16, None),
        # None is that small, and none trains the whole language model.
        ("glm_image_80gb", 12, None),
        ("glm_image_full model.dtype=float32", 80, None),
    ],
)
def test_what_does_not_fit_is_told_what_does_and_no_times(
    words: str, card: int, packaged: str | None
) -> None:
    hardware, lines = Hardware([DEVICES["rtx4090"]], card * 10**9), list[str]()
    name, *overrides = words.split()
    with pytest.raises(ModelError, match="phase takes .* more than") as caught:
        lines.extend(lines_of_plan(name, hardware, *overrides))
    assert not any("a step takes" in line or "expect about" in line for line in lines)
    named = re.findall(r"there is --config-name (\w+): ", str(caught.value))
    assert named == ([] if packaged is None else [packaged])


@pytest.mark.parametrize(("name", "said"), [("glm_image_16gb", 1), ("janus_pro_1b_16gb", 0)])
def test_another_family_is_advised_only_for_a_decoder_in_bfloat16(name: str, said: int) -> None:
    lines = plan(name, Hardware([DEVICES["t4"]]))
    assert sum("set model.dtype=float16" in line for line in lines) == 1
    assert sum("prefer Janus-Pro" in line for line in lines) == said


def test_a_card_without_bfloat16_is_fine_for_float16() -> None:
    lines = plan("janus_pro_1b_16gb", Hardware([DEVICES["t4"]]), "model.dtype=float16")
    assert not any("bfloat16" in line for line in lines)


def test_a_memory_that_no_known_card_has_is_planned_without_times() -> None:
    lines = plan("janus_pro_1b_16gb", hardware_with(20 * 10**9))
    assert any("no GPU with this memory is known" in line for line in lines)
    assert lines[-1].startswith("it fits")


@pytest.mark.parametrize(
    ("is_native", "dtype", "count"),
    [(False, "bfloat16", 1), (False, "float16", 0), (True, "bfloat16", 0)],
)
def test_a_run_is_told_if_its_device_emulates_bfloat16(
    is_native: bool, dtype: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: is_native)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    config = tiny_config(f"model.dtype={dtype}")
    hints = hint_at_bfloat16(config, torch.device("cuda"))
    assert [("Tesla T4" in hint, "model.dtype=float16" in hint) for hint in hints] == [
        (True, True)
    ] * count
    assert hint_at_bfloat16(config, torch.device("cpu")) == []
