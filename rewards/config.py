"""The `reward` section of the config: which terms score a picture, and how they are weighed.

A term that is absent, or null, is not used and its libraries are not imported. A term of weight 0
is scored and shown, but takes no part in the reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

RELATION = "relation"
"""Type of the errors below that carry `rule` and `remedy` in their context."""


class Options(BaseModel):
    """What all sections share: unknown keys, lax types and non-finite numbers are refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class TermConfig(Options):
    """What every term has."""

    weight: float
    """Factor of the term's score in the reward; negative to push the score down, 0 to watch it."""


class LpipsConfig(TermConfig):
    """LPIPS to the prompt's target picture, as 1 - distance."""

    network: Literal["alex", "vgg", "squeeze"] = "alex"
    """Backbone. Its weights are downloaded once by torchvision into TORCH_HOME/hub/checkpoints."""
    pretrained: bool = True
    """False: untrained features from a fixed seed. Needs no download; no measure of perception."""


class SsimConfig(TermConfig):
    """Structural similarity to the prompt's target picture."""


class EasyOcrConfig(TermConfig):
    """Whether the prompt's text can be read, by EasyOCR."""

    engine: Literal["easyocr"]
    """PyTorch, on the accelerator; downloads its weights once into EASYOCR_MODULE_PATH/model."""
    languages: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = ("en",)
    """EasyOCR's language codes; one script beside English."""


class RapidOcrConfig(TermConfig):
    """Whether the prompt's text can be read, by RapidOCR."""

    engine: Literal["rapidocr"]
    """ONNX on the CPU, models in the wheel (Latin and Chinese script); needs no download."""
    threads: int = Field(default=2, ge=1)
    """Pictures read at the same time, one CPU thread each."""
    detection_side: int = Field(default=256, ge=64, multiple_of=32)
    """Pixels; pictures with a shorter side below it are enlarged before text is searched. Time
    grows with its square; larger pictures are not touched."""


class AestheticConfig(TermConfig):
    """Predicted aesthetic rating: a CLIP image embedding and a small head."""

    clip_model: str = Field(default="ViT-L-14-quickgelu", min_length=1)
    """An architecture of open_clip, or the path of a model config in open_clip's JSON format."""
    clip_weights: str = Field(default="openai", min_length=1)
    """A pretrained tag of open_clip, downloaded once, or a .safetensors, .pt or .bin file."""
    head: str = Field(min_length=1)
    """Head on the embedding: a LAION .pth file (linear or MLP), or a .safetensors file with
    `weight` [1, D] and `bias` [1]. All paths may be written pkg://package/relative/path."""


def _problem(rule: str, remedy: str) -> PydanticCustomError:
    return PydanticCustomError(RELATION, "{rule}; {remedy}", {"rule": rule, "remedy": remedy})


def _problem_at(key: str, value: object, rule: str, remedy: str) -> ValidationError:
    details = InitErrorDetails(type=_problem(rule, remedy), loc=(key,), input=value)
    return ValidationError.from_exception_data("reward", [details])


_ENGINES: dict[str, type[EasyOcrConfig] | type[RapidOcrConfig]] = {
    "easyocr": EasyOcrConfig,
    "rapidocr": RapidOcrConfig,
}


def _choose_engine(value: object) -> object:
    # A discriminated union would do, but pydantic writes the tag into the key of every error:
    # reward.terms.ocr.rapidocr.threads is a key that no one can set.
    if not isinstance(value, Mapping):
        return value
    engine = value.get("engine")
    if engine not in _ENGINES:
        rule = f"must be one of {', '.join(_ENGINES)}"
        raise _problem_at("engine", engine, rule, "set engine=rapidocr, which needs no download")
    for name in value:
        if name not in _ENGINES[engine].model_fields:
            raise _foreign_option(str(name), value[name], engine)
    return _ENGINES[engine].model_validate(value)


def _foreign_option(name: str, value: object, engine: str) -> ValidationError:
    others = [other for other, config in _ENGINES.items() if name in config.model_fields]
    options = ", ".join(_ENGINES[engine].model_fields)
    remedy = f"remove it, or set engine={others[0]}" if others else f"use some of {options}"
    return _problem_at(name, value, f"is not an option of engine {engine}", remedy)


OcrConfig = Annotated[EasyOcrConfig | RapidOcrConfig, BeforeValidator(_choose_engine)]


class TermsConfig(Options):
    """The terms in use, in the order of the R axis."""

    lpips: LpipsConfig | None = None
    """Perceptual likeness to the target."""
    ssim: SsimConfig | None = None
    """Structural likeness to the target."""
    ocr: OcrConfig | None = None
    """Legibility of the prompt's text."""
    aesthetic: AestheticConfig | None = None
    """Predicted rating; applies to every prompt."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            for name in value:
                if name not in cls.model_fields:
                    rule = f"{name!r} is not a reward term"
                    remedy = f"use some of {', '.join(cls.model_fields)}"
                    raise _problem_at(str(name), value[name], rule, remedy)
        return value

    @model_validator(mode="after")
    def _check_weights(self) -> TermsConfig:
        weights = self.weights()
        if not weights:
            known = ", ".join(type(self).model_fields)
            raise _problem("no term is used, so there is no reward", f"use some of {known}")
        if not any(weights.values()):
            raise _problem(
                f"the weights of all terms ({', '.join(weights)}) are 0, so every reward is 0",
                f"set one of them, say {next(iter(weights))}.weight=1",
            )
        return self

    def weights(self) -> dict[str, float]:
        """Weight by name of the terms in use, in the order of the R axis."""
        return {name: term.weight for name, term in self if term is not None}


class RewardConfig(Options):
    """Terms and how they are weighed."""

    combine: Literal["weighted_sum", "normalize_then_sum"] = "weighted_sum"
    """`weighted_sum` of the scores, or `normalize_then_sum`: scores standardised inside each
    prompt's group first, so that terms of small spread count as much as terms of large spread."""
    terms: TermsConfig
    """The terms in use; absent or null means not used."""
