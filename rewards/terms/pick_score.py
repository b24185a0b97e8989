"""Predict human preference for a picture given its prompt, with PickScore."""

from __future__ import annotations

import logging
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float32, Int64, UInt8
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor, nn

from rewards.base import FLOAT32_BYTES, Reward, TermConfig
from rewards.options import PathText
from rewards.types import Prompt, RewardError, describe_error

_PUBLISHED_SCALE = 100.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MODEL_FILES = ("*.json", "*.safetensors")
_PROCESSOR_FILES = ("*.json", "*.txt")
_LONGEST_CAUSE = 400  # characters: weights of another model differ in thousands of tensors

_logger = logging.getLogger(__name__)


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

    def check(self) -> None:
        """See `TermConfig`; hub ids are not looked for."""
        _refuse_no_source(self.processor, "pick_score.processor")
        _refuse_no_source(self.model, "pick_score.model")

    def build(self, device: torch.device) -> Reward:
        """See `TermConfig`."""
        return PickScoreReward(model=self.model, processor=self.processor, device=device)

    def memory_bytes(self) -> int:
        """Size of CLIP ViT-H/14, both towers."""
        return 986_000_000 * FLOAT32_BYTES


class PickScoreReward:
    """The published PickScore divided by 100, higher is better.

    PickScore is exp(logit_scale) * cosine of the embeddings of prompt and picture, by a CLIP
    ViT-H-14 that was fine-tuned on human choices between pictures. Published scores are about 20;
    divided by 100 they are about 0.2, like the cosines of `clip_score` and `hps`. The range is
    -s..s with s = exp(logit_scale) / 100, which is 1 for a scale of 100, the largest in CLIP's
    training. Prompts are truncated to 77 tokens. Pictures are prepared by the model's own image
    processor, with Pillow.

    Needs the prompt. 986 million parameters, 3.9 GB of memory in float32 besides the activations.
    Weights https://huggingface.co/yuvalkirstain/PickScore_v1, whose card names no licence; the base
    model, laion/CLIP-ViT-H-14-laion2B-s32B-b79K, is under MIT.
    Source: Kirstain et al., Pick-a-Pic, NeurIPS 2023, https://github.com/yuvalkirstain/PickScore.

    Args:
        model: A hub id, downloaded once, or a folder with `config.json` and weights.
        processor: A hub id, or a folder with tokenizer and image processor.
        device: Device for the model.

    Raises:
        RewardError: Model or processor is missing, cannot be downloaded, is incomplete, or does not
            match the other.
    """

    def __init__(self, *, model: str, processor: str, device: torch.device) -> None:
        # The processor first, because it is small and reveals mistakes before gigabytes are loaded.
        prepare = _load_processor(_find_folder(processor, "pick_score.processor", _PROCESSOR_FILES))
        self._image_processor = prepare.image_processor
        self._tokenizer = prepare.tokenizer
        loaded = _load_model(_find_folder(model, "pick_score.model", _MODEL_FILES))
        text_config = loaded.config.text_config
        if len(self._tokenizer) > text_config.vocab_size:
            raise RewardError(
                f"pick_score.processor {processor!r} knows {len(self._tokenizer)} tokens, "
                f"pick_score.model {model!r} {text_config.vocab_size}: use the processor of the "
                "model, or of the one it was fine-tuned from"
            )
        self._places: int = text_config.max_position_embeddings
        self._has_told_of_cut = False
        self._model: nn.Module = loaded.to(device)

    def applies_to(self, prompt: Prompt) -> bool:
        """True: it applies to every prompt."""
        return True

    @torch.no_grad()
    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        """Rate how well each picture answers its prompt, on the device of the model."""
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
        pictures = [Image.fromarray(picture.permute(1, 2, 0).numpy()) for picture in pixels.cpu()]
        prepared: Tensor = self._image_processor(pictures, return_tensors="pt")["pixel_values"]
        return prepared

    def _tokenize(self, texts: list[str]) -> Int64[Tensor, "M T"]:
        tokens: Tensor = self._tokenizer(
            texts,
            padding="max_length",
            truncation=True,
            max_length=self._places,
            return_tensors="pt",
        )["input_ids"]
        if not self._has_told_of_cut:
            self._tell_of_cut(texts)
        return tokens

    def _tell_of_cut(self, texts: list[str]) -> None:
        roomier = self._tokenizer(texts, truncation=True, max_length=self._places + 1)["input_ids"]
        for text, tokens in zip(texts, roomier, strict=True):
            if len(tokens) > self._places:
                self._has_told_of_cut = True
                _logger.warning(
                    "pick_score.model: the model reads %d tokens; the end of longer prompts, such "
                    "as %r, is ignored (shown once)",
                    self._places,
                    textwrap.shorten(text, 120),
                )
                return


def _refuse_no_source(source: str, key: str) -> None:
    path = Path(source)
    if not path.is_dir() and (path.exists() or not _HUB_ID.fullmatch(source)):
        raise RewardError(
            f"{key} {source!r} is neither a folder nor a hub id of the form owner/name; write the "
            f"path of a folder, or leave {key} out for the published one"
        )


def _find_folder(source: str, key: str, patterns: tuple[str, ...]) -> Path:
    import huggingface_hub  # noqa: PLC0415

    _refuse_no_source(source, key)
    if Path(source).is_dir():
        return Path(source)
    try:
        # One request; loading by hub id would request each file, with retries for each.
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:
        cause = _shorten(describe_error(error))
        raise RewardError(
            f"{key} {source!r} is not a folder, and cannot be downloaded from the hub ({cause}). "
            "It is downloaded once into HF_HOME. Without a network: download "
            f"https://huggingface.co/{source} elsewhere (hf download {source} --local-dir FOLDER) "
            f"and set {key}=FOLDER"
        ) from error


def _load_processor(folder: Path) -> Any:
    from transformers import AutoProcessor  # noqa: PLC0415
    from transformers.processing_utils import ProcessorMixin  # noqa: PLC0415

    try:
        # Pillow, as for the published scores; the other backend rounds differently.
        processor = AutoProcessor.from_pretrained(
            folder,
            local_files_only=True,
            backend="pil",
            # Explicit, because otherwise transformers asks on the terminal.
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        raise _incomplete_processor(folder, describe_error(error)) from error
    if not isinstance(processor, ProcessorMixin):
        raise _incomplete_processor(folder, f"it contains only a {type(processor).__name__}")
    return processor


def _load_model(folder: Path) -> Any:
    from transformers import CLIPModel  # noqa: PLC0415

    try:
        # Weights missing in a file are drawn randomly; fork_rng restores the generator.
        with torch.random.fork_rng(devices=[]):
            model, report = CLIPModel.from_pretrained(
                folder,
                dtype=torch.float32,
                local_files_only=True,
                output_loading_info=True,
                use_safetensors=True,
            )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise _incomplete_model(folder, describe_error(error)) from error
    if report["missing_keys"]:
        raise _incomplete_model(folder, f"it lacks {', '.join(sorted(report['missing_keys']))}")
    return model.eval().requires_grad_(False)


def _incomplete_processor(folder: Path, cause: str) -> RewardError:
    return RewardError(
        f"pick_score.processor {folder} cannot be loaded ({_shorten(cause)}); the folder must "
        "contain a tokenizer (tokenizer.json) and an image processor (preprocessor_config.json), "
        "as laion/CLIP-ViT-H-14-laion2B-s32B-b79K does"
    )


def _incomplete_model(folder: Path, cause: str) -> RewardError:
    return RewardError(
        f"pick_score.model {folder} cannot be loaded ({_shorten(cause)}); the folder must contain "
        "the config.json of a CLIP model and all its weights (model.safetensors), as "
        "yuvalkirstain/PickScore_v1 does"
    )


def _shorten(cause: str) -> str:
    return textwrap.shorten(cause, _LONGEST_CAUSE)
