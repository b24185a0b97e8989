"""Options of each reward term.

A term's `kind` says which class scores; it is the term's name where that is the name of a kind, and
must be written where the term has a name of its own, so that one kind can be used twice.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from rewards.keys import TOKEN_VARIABLE
from rewards.options import LONGEST_WAIT, Options, PathText, Url, Variable, problem_at

Need = Literal["prompt", "text", "target"]
"""What a term compares a picture with."""


class TermConfig(Options):
    """What every term has."""

    compares_with: ClassVar[tuple[Need, ...]]
    """What of a prompt the term looks at; empty for a term that looks at the picture alone."""

    weight: float
    """Factor of the term's score in the reward; negative to push the score down. At 0 the score is
    shown and not rewarded; `reward.watch` makes such a term a canary."""
    std_floor: float = Field(default=1e-4, gt=0.0)
    """Smallest divisor when scores are standardised inside a group (`normalize_then_sum`), in units
    of the score: the spread below which differences are noise."""
    timeout_seconds: float = Field(default=600.0, gt=0.0, le=LONGEST_WAIT)
    """Seconds to score one group of pictures; after that the run stops, with everything saved."""
    run_in: Literal["thread", "process"] = "thread"
    """`process`: score in a process of its own (`glm-grpo serve-reward` on this machine; needs the
    extra `serve`), which a crash or a leak of the term's libraries cannot harm."""

    def needs(self) -> tuple[Need, ...]:
        """What of a prompt this term looks at."""
        return self.compares_with


class LpipsConfig(TermConfig):
    """LPIPS to the prompt's target picture, as 1 - distance."""

    compares_with = ("target",)
    kind: Literal["lpips"]
    """Class that scores."""
    network: Literal["alex", "vgg", "squeeze"] = "alex"
    """Backbone. Its weights are downloaded once by torchvision into TORCH_HOME/hub/checkpoints."""
    pretrained: bool = True
    """False: untrained features from a fixed seed. Needs no download; no measure of perception."""


class SsimConfig(TermConfig):
    """Structural similarity to the prompt's target picture."""

    compares_with = ("target",)
    kind: Literal["ssim"]
    """Class that scores."""


class PsnrConfig(TermConfig):
    """Peak signal-to-noise ratio to the prompt's target picture."""

    compares_with = ("target",)
    kind: Literal["psnr"]
    """Class that scores."""


class OcrConfig(TermConfig):
    """Whether the prompt's texts can be read."""

    compares_with = ("text",)
    kind: Literal["ocr"]
    """Class that scores."""
    case_sensitive: bool = False
    """Whether OPEN read for Open is a mistake."""
    extra_text_penalty: float = Field(default=0.0, ge=0.0, le=1.0)
    """Taken from the score in proportion to the share of what was read that no one asked for."""


class EasyOcrConfig(OcrConfig):
    """Whether the prompt's texts can be read, by EasyOCR."""

    engine: Literal["easyocr"]
    """PyTorch, on the accelerator; downloads its weights once into EASYOCR_MODULE_PATH/model."""
    languages: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = ("en",)
    """EasyOCR's language codes; one script beside English."""


class RapidOcrConfig(OcrConfig):
    """Whether the prompt's texts can be read, by RapidOCR."""

    engine: Literal["rapidocr"]
    """ONNX on the CPU, models in the wheel (Latin and Chinese script); needs no download."""
    threads: int = Field(default=2, ge=1, le=1024)
    """Pictures read at the same time, one CPU thread each."""
    detection_side: int = Field(default=256, ge=64, le=16_384, multiple_of=32)
    """Pixels; pictures with a shorter side below it are enlarged before text is searched. Time
    grows with its square; larger pictures are not touched."""


class AestheticConfig(TermConfig):
    """Predicted aesthetic rating: a CLIP image embedding and a small head."""

    compares_with = ()
    kind: Literal["aesthetic"]
    """Class that scores."""
    clip_model: PathText = "ViT-L-14-quickgelu"
    """An architecture of open_clip, or the path of a model config in open_clip's JSON format."""
    clip_weights: PathText = "openai"
    """A pretrained tag of open_clip, downloaded once, or a .safetensors, .pt or .bin file."""
    head: PathText
    """Head on the embedding: a LAION .pth file (linear or MLP), or a .safetensors file with
    `weight` [1, D] and `bias` [1]. All paths may be written pkg://package/relative/path."""


class ClipScoreConfig(TermConfig):
    """Cosine of the CLIP embeddings of prompt and picture."""

    compares_with = ("prompt",)
    kind: Literal["clip_score"]
    """Class that scores."""
    clip_model: PathText = "ViT-L-14-quickgelu"
    """An architecture of open_clip, or the path of a model config in open_clip's JSON format."""
    clip_weights: PathText = "openai"
    """A pretrained tag of open_clip, downloaded once, or a .safetensors, .pt or .bin file."""


class ClipImageConfig(TermConfig):
    """Cosine of the CLIP embeddings of target picture and picture."""

    compares_with = ("target",)
    kind: Literal["clip_image"]
    """Class that scores."""
    clip_model: PathText = "ViT-L-14-quickgelu"
    """An architecture of open_clip, or the path of a model config in open_clip's JSON format."""
    clip_weights: PathText = "openai"
    """A pretrained tag of open_clip, downloaded once, or a .safetensors, .pt or .bin file."""


class PickScoreConfig(TermConfig):
    """Human preference for the picture given the prompt, as PickScore predicts it."""

    compares_with = ("prompt",)
    kind: Literal["pick_score"]
    """Class that scores."""
    model: PathText = "yuvalkirstain/PickScore_v1"
    """A hub id, or a folder that holds the model."""
    processor: PathText = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    """A hub id, or a folder that holds tokenizer and image processor."""


class HpsConfig(TermConfig):
    """Human preference for the picture given the prompt, as HPS v2 predicts it."""

    compares_with = ("prompt",)
    kind: Literal["hps"]
    """Class that scores."""
    clip_model: PathText = "ViT-H-14"
    """An architecture of open_clip, or the path of a model config in open_clip's JSON format."""
    checkpoint: PathText = "HPS_v2.1_compressed.pt"
    """The published checkpoint, a file from huggingface.co/xswu/HPSv2."""


class VlmJudgeConfig(TermConfig):
    """A vision-language model behind an OpenAI-compatible endpoint gives the score."""

    kind: Literal["vlm_judge"]
    """Class that scores."""
    url: Url
    """Base of the endpoint, such as http://127.0.0.1:8000/v1; /chat/completions is added."""
    model: str = Field(min_length=1)
    """Name of the model, as the endpoint knows it."""
    question: str = Field(
        default=(
            "How well does the picture show this: {prompt}\n"
            "Answer with one whole number from {lowest} (not at all) to {highest} (perfectly) and "
            "nothing else."
        ),
        min_length=1,
    )
    """Question about one picture; {prompt}, {text} (the texts that are asked for, in quotation
    marks), {lowest} and {highest} are filled in. Braces that are meant are doubled."""
    lowest: int = Field(default=0, ge=-(10**6), le=10**6)
    """Lowest score the model may answer; becomes 0."""
    highest: int = Field(default=10, ge=-(10**6), le=10**6)
    """Highest score the model may answer; becomes 1."""
    api_key_variable: Variable | None = None
    """Environment variable that holds the key; absent: none is sent."""
    request_timeout_seconds: float = Field(default=60.0, gt=0.0, le=LONGEST_WAIT)
    """Seconds one request may take before it is tried again."""
    retries: int = Field(default=3, ge=0, le=1000)
    """Further tries after a time-out, a broken connection, or an answer of status 429 or 5xx."""
    requests_at_once: int = Field(default=8, ge=1, le=1024)
    """Requests in flight at a time."""

    @model_validator(mode="after")
    def _check_range(self) -> VlmJudgeConfig:
        if self.lowest >= self.highest:
            rule = f"must be below highest = {self.highest}: scores between them become 0 to 1"
            remedy = f"set lowest={self.highest - 1} or less, or a higher highest"
            raise problem_at(("lowest",), self.lowest, rule, remedy)
        return self

    def needs(self) -> tuple[Need, ...]:
        """What the question is about."""
        question = self.question.replace("{{", "")
        return tuple(need for need in ("prompt", "text") if f"{{{need}}}" in question)


class RemoteConfig(TermConfig):
    """A scorer on another machine or in another Python environment, over HTTP."""

    kind: Literal["remote"]
    """Class that scores."""
    url: Url
    """Where `glm-grpo serve-reward` listens, such as http://scores.example:8700."""
    token_variable: Variable | None = TOKEN_VARIABLE
    """Environment variable that holds the scorer's token; null, or not set: none is sent."""
    needs_of_prompt: Annotated[tuple[Need, ...], Field(strict=False)] = ("prompt",)
    """What of a prompt the scorer looks at: some of prompt, text, target, as the scorer says it
    does. It is not asked about prompts that lack it."""
    retries: int = Field(default=3, ge=0, le=1000)
    """Further tries after a broken connection or an answer of status 502, 503 or 504."""

    @model_validator(mode="after")
    def _check_place(self) -> RemoteConfig:
        if self.run_in == "process":
            rule = "a remote scorer is in a process of its own already"
            raise problem_at(("run_in",), self.run_in, rule, "remove run_in")
        return self

    def needs(self) -> tuple[Need, ...]:
        """As the user stated."""
        return self.needs_of_prompt


class CustomConfig(TermConfig):
    """A function of the user's own."""

    kind: Literal["custom"]
    """Class that scores."""
    function: str = Field(min_length=3, max_length=500, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`module:function`, importable from the folder the run starts in. It gets a list of N prompts
    and pictures UInt8 [N, 3, H, W], and returns N finite numbers as a Float32 tensor [N]."""
    needs_of_prompt: Annotated[tuple[Need, ...], Field(strict=False)] = ("prompt",)
    """What of a prompt the function looks at: some of prompt, text, target. It is not called for
    prompts that lack it."""

    def needs(self) -> tuple[Need, ...]:
        """As the user stated."""
        return self.needs_of_prompt


KINDS: dict[str, type[TermConfig]] = {
    "lpips": LpipsConfig,
    "ssim": SsimConfig,
    "ocr": OcrConfig,
    "aesthetic": AestheticConfig,
    "psnr": PsnrConfig,
    "clip_score": ClipScoreConfig,
    "clip_image": ClipImageConfig,
    "pick_score": PickScoreConfig,
    "hps": HpsConfig,
    "vlm_judge": VlmJudgeConfig,
    "remote": RemoteConfig,
    "custom": CustomConfig,
}
"""By name, in the order of the R axis."""

OCR_ENGINES: dict[str, type[EasyOcrConfig] | type[RapidOcrConfig]] = {
    "easyocr": EasyOcrConfig,
    "rapidocr": RapidOcrConfig,
}
"""The two forms of `OcrConfig`."""
