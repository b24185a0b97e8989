"""The run's config: composed by Hydra, validated by pydantic; refusals name the remedy."""

from __future__ import annotations

from glm_grpo.config.composition import (
    compose_config,
    parse_override,
    resolve_config,
    shell_override,
    write_out_weights,
)
from glm_grpo.config.effective import EffectiveConfig, effective_config
from glm_grpo.config.load import (
    can_be_extended,
    config_differences,
    flatten,
    from_yaml,
    set_key,
    to_yaml,
    validate_config,
)
from glm_grpo.config.paths import local_paths, with_absolute_paths
from glm_grpo.config.root import Config
from glm_grpo.config.sections import (
    EMBEDDED_MODELS,
    LONGEST_NOTES,
    AdapterSection,
    AsyncSection,
    DataSection,
    DecodeSection,
    EvalSection,
    ModelSection,
    OptimSection,
    RolloutSection,
    RunSection,
    TrainSection,
)

__all__ = [
    "EMBEDDED_MODELS",
    "LONGEST_NOTES",
    "AdapterSection",
    "AsyncSection",
    "Config",
    "DataSection",
    "DecodeSection",
    "EffectiveConfig",
    "EvalSection",
    "ModelSection",
    "OptimSection",
    "RolloutSection",
    "RunSection",
    "TrainSection",
    "can_be_extended",
    "compose_config",
    "config_differences",
    "effective_config",
    "flatten",
    "from_yaml",
    "local_paths",
    "parse_override",
    "resolve_config",
    "set_key",
    "shell_override",
    "to_yaml",
    "validate_config",
    "with_absolute_paths",
    "write_out_weights",
]
