"""Protocol of a family of models: all that the rest of the package knows of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from glm_grpo.config import Config
from glm_grpo.config.sections import AdapterSection
from glm_grpo.errors import ConfigError
from glm_grpo.models.adapted_policy import AdaptedPolicy
from glm_grpo.models.base import Decoder, ReservedTokens, TextRule
from glm_grpo.models.export_page import StockSettings
from glm_grpo.models.planning import Planner
from rewards.problems import Problem, describe_problems


def unused_key_problems(config: Config, keys: Iterable[str], *, name: str) -> list[Problem]:
    """Problems of keys without an effect whose values are not their defaults.

    Args:
        keys: Keys of sections, such as `decode.steps`.
        name: Name of the family.
    """
    problems = []
    for key in keys:
        section, _, option = key.partition(".")
        values = getattr(config, section)
        given, default = getattr(values, option), type(values).model_fields[option].default
        if given != default:
            rule = f"has no effect with {name}"
            remedy = f"leave it out ('~{key}' on the command line if a file sets it)"
            problems.append(Problem(key, given, rule, remedy))
    return problems


def adapter_problems(adapter: AdapterSection | None, modules: Sequence[str]) -> list[Problem]:
    """Problems of layers to adapt that the language model does not have.

    Args:
        modules: Names of the layers that can be adapted.
    """
    chosen = () if adapter is None else adapter.target_modules or ()
    if not {*chosen} - {*modules}:
        return []
    rule, remedy = f"must be some of {', '.join(modules)}", "leave it out to adapt all of them"
    return [Problem("model.adapter.target_modules", list(chosen), rule, remedy)]


def refuse(problems: Sequence[Problem]) -> None:
    """Raise an error that describes all problems; nothing if there are none."""
    if problems:
        raise ConfigError(describe_problems(problems))


@runtime_checkable
class ModelFamily(Protocol):
    """Models with the same classes and folder layout; implemented by a module.

    `path` is a folder or a hub id. A `pipeline` is what `load_pipeline` returned: all parts of a
    model, whose type only the family knows.

    Attributes:
        NAME: Name for messages.
        TEXT_RULE: How the model finds texts to draw; None if it reads a prompt as a whole.
    """

    NAME: str
    TEXT_RULE: TextRule | None

    def check_keys(self, config: Config) -> None:
        """Refuse keys that have no effect with this family, and values that it cannot take.

        Raises:
            ConfigError: The message names keys, rules and remedies.
        """
        ...

    def check_model(self, path: str) -> ReservedTokens:
        """Check what can be read in a second, before weights are downloaded or loaded.

        Returns:
            Texts that no prompt may contain.

        Raises:
            ModelError: No model can be loaded from there.
        """
        ...

    def check_sizes(self, path: str, config: Config) -> None:
        """Refuse image sizes that the model cannot draw, or at which it cannot read images.

        Raises:
            ConfigError: The size is refused; the message names size, rule and remedy.
        """
        ...

    def hint_at_size(self, path: str, config: Config) -> list[str]:
        """Hint on an image size for which the model was not trained."""
        ...

    def knows_sizes(self, path: str) -> bool:
        """Whether `build_planner` can know the model without a download."""
        ...

    def build_planner(self, path: str) -> Planner:
        """Build the planner for runs of a model.

        Raises:
            ModelError: The model's configs are not available.
        """
        ...

    def load_pipeline(
        self,
        path: str,
        *,
        dtype: torch.dtype,
        quantization: str | None = ...,
        decoder_quantization: str | None = ...,
        quantize_on: torch.device = ...,
    ) -> Any:
        """Load all parts on the CPU in evaluation mode.

        Args:
            path: A folder or a hub id.
            dtype: Dtype of all weights that are not quantised.
            quantization: `model.quantization`.
            decoder_quantization: `decode.quantization`.
            quantize_on: Device that quantises.

        Raises:
            ModelError: Loading failed.
        """
        ...

    def describe(self, pipeline: Any) -> str:
        """Name policy and decoder with their sizes, for the log."""
        ...

    def build_policy(
        self, config: Config, pipeline: Any, *, is_compiling: bool = False
    ) -> AdaptedPolicy:
        """Build the policy from the parts of a loaded pipeline."""
        ...

    def build_decoder(self, config: Config, pipeline: Any, *, is_compiling: bool) -> Decoder:
        """Build the decoder from the parts of a loaded pipeline."""
        ...

    def export(
        self,
        policy: Any,
        pipeline: Any,
        settings: StockSettings,
        directory: Path,
        *,
        kind: Literal["adapter", "pipeline"],
    ) -> None:
        """Write trained weights, with a page for the hub, in a format that other programs load.

        The policy cannot be trained after this.

        Args:
            policy: What `build_policy` returned for `pipeline`.
            pipeline: Provides the parts that were not trained.
            directory: Output folder, new or empty.
            kind: `adapter` exports a policy without adapters as a pipeline.
        """
        ...
