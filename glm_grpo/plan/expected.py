"""Expect the time of a step from its floors and from what measured steps took beside theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from glm_grpo.config import Config
from glm_grpo.plan.floors import PhaseFloor

RATIOS: Mapping[str, float] = {"rollout": 3.6, "decode": 2.0, "update": 3.6, "offload": 1.2}
"""Seconds of a phase divided by its floor, in the second step of `glm_image_80gb` on 8 images; of
copies to and from the device alone.

Source: benchmarks/RESULTS.md, On a GPU (one H200, random weights, compiled decoder).
"""

EAGER_DECODE = 3.0
"""The same of a decoder that is not compiled, such as one in 8 bits: 2 images, 8 steps."""

GROUND = "a step of GLM-Image on an H200"
"""Which step was measured."""

LONG = 24 * 3600.0
"""Seconds of a run from which cheaper settings are named."""

_CHEAPER = (("decode", "rollout_steps", 4), ("rollout", "group_size", 4))
"""Settings of a step that save the most time, applied one after the other."""


def expected_seconds(config: Config, floors: Mapping[str, PhaseFloor]) -> float:
    """Seconds of a step whose phases take as many times their floors as those that were measured.

    Time for scores is not included. Devices with less bandwidth than an H200 probably lose less in
    the rollout, because small operations take as long there.

    Args:
        config: Config of the planned run.
        floors: Floors by phase, for the same config.
    """
    is_eager = not config.decode.compile or config.decode.quantization is not None
    ratios = {**RATIOS, "decode": EAGER_DECODE} if is_eager else RATIOS
    return sum(ratios[phase] * floor.seconds for phase, floor in floors.items())


def cheaper_configs(config: Config) -> Iterator[tuple[str, Config]]:
    """Configs whose steps take less time, each with the overrides that lead to it.

    None if the decoder does not denoise: then no single key saves as much. None for `sft`, which
    samples and decodes nothing.
    """
    if config.decode.training_steps is None or config.train.method == "sft":
        return
    values, overrides = config.model_dump(mode="json"), list[str]()
    for section, name, value in _CHEAPER:
        if (values[section][name] or config.decode.training_steps) > value:
            values[section][name] = value
            overrides.append(f"{section}.{name}={value}")
            yield " ".join(overrides), Config.model_validate(values)
