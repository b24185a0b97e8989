"""Predict human preference for an image given its prompt, with PickScore."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor, nn
from typing_extensions import override

from rewards.base import FLOAT32_BYTES, Reward, TermConfig
from rewards.images import to_pil
from rewards.options import PathText
from rewards.types import Prompt, RewardError, describe_error

_PUBLISHED_SCALE = 100.0
_MODEL_FILES = ("*.json", "*.safetensors")
_PROCESSOR_FILES = ("*.json", "*.txt")
_LONGEST_CAUSE = 400  # characters: weights of another model differ in thousands of tensors


class PickScoreConfig(TermConfig):
    """Human preference for the image given the prompt, as predicted by PickScore."""

    compares_with = ("prompt",)
    folders = ("model", "processor")
    kind: Literal["pick_score"]
    """Class that scores."""
    model: PathText = "yuvalkirstain/PickScore_v1"
    """A hub id, or a folder with the model."""
    processor: PathText = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    """A hub id, or a folder with tokenizer and image processor."""

    @override
    def check(self) -> None:
        """Check the form of hub ids, without looking for them."""
        from huggingface_hub.utils import (  # type: ignore[attr-defined]  # noqa: PLC0415
            validate_repo_id,
        )

        for option, source in (("processor", self.processor), ("model", self.model)):
            if not Path(source).is_dir():
                with _refusing(option, source):
                    validate_repo_id(source)

    @override
    def build(self, device: torch.device) -> Reward:
        return PickScoreReward(self, device)

    @override
    def memory_bytes(self) -> int:
        """Size of CLIP ViT-H/14, both towers."""
        return 986_000_000 * FLOAT32_BYTES


class PickScoreReward:
    """The published PickScore divided by 100, higher is better.

    PickScore is exp(logit_scale) * cosine of the embeddings of prompt and image, by a CLIP
    ViT-H-14 that was fine-tuned on human choices between images. Published scores are about 20;
    divided by 100 they are about 0.2, like the cosines of `clip_score` and `hps`. The range is
    -s..s with s = exp(logit_scale) / 100, which is 1 for a scale of 100, the largest in CLIP's
    training. The end of a prompt longer than 77 tokens is ignored. Images are prepared by the
    model's own image processor, with Pillow.

    986 million parameters, 3.9 GB of memory in float32 besides the activations.
    Weights https://huggingface.co/yuvalkirstain/PickScore_v1, whose card names no licence; the base
    model, laion/CLIP-ViT-H-14-laion2B-s32B-b79K, is under MIT.
    Source: Kirstain et al., Pick-a-Pic, NeurIPS 2023, https://github.com/yuvalkirstain/PickScore.

    Raises:
        RewardError: Model or processor is missing, cannot be downloaded, or is incomplete.
    """

    def __init__(self, config: PickScoreConfig, device: torch.device) -> None:
        # The processor first, because it is small and reveals mistakes before gigabytes are loaded.
        with _refusing("processor", config.processor):
            prepare = _load_processor(_find_folder(config.processor, _PROCESSOR_FILES))
        self._image_processor = prepare.image_processor
        self._tokenizer = prepare.tokenizer
        with _refusing("model", config.model):
            loaded = _load_model(_find_folder(config.model, _MODEL_FILES))
        self._places: int = loaded.config.text_config.max_position_embeddings
        self._model: nn.Module = loaded.to(device)

    def applies_to(self, prompt: Prompt) -> bool:
        """True: it applies to every prompt."""
        return True

    @torch.no_grad()
    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        """Rate how well each image answers its prompt, on the device of the model."""
        # A group shares its prompt, which therefore goes through the text tower once.
        texts = list(dict.fromkeys(prompt.prompt for prompt in prompts))
        columns = [texts.index(prompt.prompt) for prompt in prompts]
        device = next(self._model.parameters()).device
        # No mask is needed: the text tower is causal, and padding comes after the text.
        output = self._model(
            input_ids=self._tokenize(texts).to(device),
            pixel_values=self._prepare(pixels).to(device),
        )
        scores: Float32[Tensor, "N M"] = output.logits_per_image
        return scores[torch.arange(len(prompts)), columns] / _PUBLISHED_SCALE

    def modules(self) -> tuple[nn.Module, ...]:
        """Both towers, in one module."""
        return (self._model,)

    def _prepare(self, pixels: UInt8[Tensor, "N 3 H W"]) -> Float32[Tensor, "N 3 S S"]:
        images = [to_pil(image) for image in pixels.cpu()]
        prepared: Tensor = self._image_processor(images, return_tensors="pt")["pixel_values"]
        return prepared

    def _tokenize(self, texts: list[str]) -> Int64[Tensor, "M T"]:
        tokens: Tensor = self._tokenizer(
            texts,
            padding="max_length",
            truncation=True,
            max_length=self._places,
            return_tensors="pt",
        )["input_ids"]
        return tokens


def _find_folder(source: str, patterns: tuple[str, ...]) -> Path:
    import huggingface_hub  # noqa: PLC0415

    if Path(source).is_dir():
        return Path(source)
    # One request; loading by hub id would request each file, with retries for each.
    return Path(huggingface_hub.snapshot_download(source, allow_patterns=list(patterns)))


def _load_processor(folder: Path) -> Any:
    from transformers import AutoProcessor  # noqa: PLC0415

    # Pillow, as for the published scores; the other backend rounds differently. Trust is explicit,
    # because otherwise transformers asks on the terminal.
    return AutoProcessor.from_pretrained(
        folder, local_files_only=True, backend="pil", trust_remote_code=False
    )


def _load_model(folder: Path) -> Any:
    from transformers import CLIPModel  # noqa: PLC0415

    # Weights missing in a file are drawn randomly; fork_rng restores the generator.
    with torch.random.fork_rng(devices=[]):
        model, report = CLIPModel.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            use_safetensors=True,
        )
    if report["missing_keys"]:
        raise ValueError(f"it lacks {', '.join(sorted(report['missing_keys']))}")
    return model.eval().requires_grad_(False)


@contextmanager
def _refusing(option: str, source: str) -> Iterator[None]:
    try:
        yield
    # Libraries raise whatever a wrong byte leads to.
    except Exception as error:
        cause = textwrap.shorten(describe_error(error), _LONGEST_CAUSE)
        raise RewardError(
            f"pick_score.{option} {source!r} cannot be loaded ({cause}). It must be a folder, or a "
            "hub id owner/name, which is downloaded once into HF_HOME; without a network, run "
            "hf download owner/name --local-dir FOLDER elsewhere, and name the folder"
        ) from error
