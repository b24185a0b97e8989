"""Find and load CLIP models of open_clip, and embed images and prompts with them."""

from __future__ import annotations

import functools
import json
import logging
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor, nn
from torch.nn.functional import normalize

from rewards.images import to_pil
from rewards.options import Options, PathText
from rewards.types import RewardError
from rewards.unpickling import describe_refusal

# open_clip and transformers are imported in functions, so that configs without CLIP start faster.

ResizeMode = Literal["shortest", "longest"]

_PACKAGE_SCHEME = "pkg://"
_LONGEST_CAUSE = 400  # characters: weights of another model differ in thousands of tensors


class ClipOptions(Options):
    """Options of a term that uses a CLIP model."""

    clip_model: PathText = "ViT-L-14-quickgelu"
    """An open_clip architecture, or the path of a model config in open_clip's JSON format."""
    clip_weights: PathText = "openai"
    """A pretrained tag of open_clip, downloaded once, or a .safetensors, .pt or .bin file."""


class ImageEmbedder:
    """Image tower of a CLIP model, with the transform for its images.

    Images are transformed one by one with open_clip's own transform, using Pillow; a batched
    transform on tensors would round differently.

    Args:
        resize_mode: Which edge of an image is fitted to the tower's square: `shortest` crops the
            rest, `longest` pads with black. None: as published with the weights, which is
            `shortest` for most models and all local files.
    """

    def __init__(self, clip: Any, *, resize_mode: ResizeMode | None = None) -> None:
        from open_clip.transform import PreprocessCfg, image_transform_v2  # noqa: PLC0415

        self.tower: nn.Module = clip.visual
        options = dict(clip.visual.preprocess_cfg)
        if resize_mode is not None:
            options["resize_mode"] = resize_mode
        self._transform = image_transform_v2(PreprocessCfg(**options), is_train=False)

    def embed(
        self, pixels: UInt8[Tensor, "N 3 H W"] | Sequence[UInt8[Tensor, "3 _ _"]]
    ) -> Float32[Tensor, "N D"]:
        """Embed images, of any sizes, on the tower's device; embeddings have length 1."""
        inputs = torch.stack([self._transform(to_pil(image.cpu())) for image in pixels])
        device = next(self.tower.parameters()).device
        return normalize(self.tower(inputs.to(device)), dim=-1)


class PromptEmbedder:
    """Text tower of a CLIP model, with open_clip's tokenizer for it.

    The end of a prompt that is too long for the tower is ignored: most read 77 tokens.

    Raises:
        RewardError: The tokenizer cannot be loaded.
    """

    def __init__(self, clip: Any, architecture: str, *, key: str) -> None:
        import open_clip  # noqa: PLC0415

        text_config = open_clip.get_model_config(architecture)["text_cfg"]
        # Otherwise transformers asks on the terminal; the given config may set it to true.
        options = {"trust_remote_code": False} if text_config.get("hf_tokenizer_name") else {}
        self._clip = clip
        with _refusing(f"{key} {architecture!r}: its tokenizer"):
            self._tokenize = open_clip.get_tokenizer(architecture, **options)

    def embed(self, prompts: Sequence[str]) -> Float32[Tensor, "N D"]:
        """Embed prompts on the model's current device; embeddings have length 1."""
        # A group shares its prompt, which therefore goes through the tower once.
        texts = list(dict.fromkeys(prompts))
        device = next(self._clip.parameters()).device
        embeddings = normalize(self._clip.encode_text(self._tokenize(texts).to(device)), dim=-1)
        return embeddings[[texts.index(prompt) for prompt in prompts]]


def pair_cosine(
    first: Float32[Tensor, "N D"], second: Float32[Tensor, "N D"]
) -> Float32[Tensor, " N"]:
    """Cosine, -1..1, of each pair of embeddings of length 1."""
    # Rounding errors can exceed the range by about 1e-7.
    return (first * second).sum(dim=-1).clamp(-1.0, 1.0)


def resolve_path(text: str) -> Path:
    """Resolve a path; `pkg://package/relative/path` names a file in a package."""
    if not text.startswith(_PACKAGE_SCHEME):
        return Path(text)
    package, _, relative = text.removeprefix(_PACKAGE_SCHEME).partition("/")
    try:
        return Path(str(files(package).joinpath(relative)))
    except ModuleNotFoundError as error:
        raise RewardError(
            f"{text}: no package {package!r} is installed; write {_PACKAGE_SCHEME}package/path "
            "with the name that Python imports, or a plain path"
        ) from error


def find_architecture(clip_model: str, *, key: str) -> str:
    """Find an architecture by its name in open_clip, or register one from a model config.

    Args:
        clip_model: A name from `open_clip.list_models()`, or the path of a .json model config.
        key: Config key of `clip_model`, for errors.

    Returns:
        Name under which open_clip knows it.
    """
    import open_clip  # noqa: PLC0415

    architecture = clip_model
    if clip_model.endswith(".json"):
        path = resolve_path(clip_model)
        architecture = path.stem
        # open_clip registers a config by its file's stem, in one table with its own.
        if architecture not in open_clip.list_models():
            with _refusing(f"{key} {path}"):
                # First, because open_clip reads all registered configs again each time.
                json.loads(path.read_text(encoding="utf-8"))
            open_clip.add_model_config(path)
    if architecture not in open_clip.list_models():
        raise RewardError(
            f"{key} {clip_model!r} is not an architecture of open_clip; use one of "
            "open_clip.list_models(), such as ViT-L-14-quickgelu, or the path of a .json model "
            "config with embed_dim, vision_cfg and text_cfg"
        )
    return architecture


def check_clip(clip_model: str, clip_weights: str, *, kind: str) -> str:
    """Find an architecture, and its weights where they are a local file, without loading them.

    Args:
        clip_model: As in `find_architecture`.
        clip_weights: As in `load_clip`; a tag is not looked for, which needs a network.

    Returns:
        Name under which open_clip knows the architecture.
    """
    from open_clip.pretrained import get_pretrained_cfg  # noqa: PLC0415

    architecture = find_architecture(clip_model, key=f"{kind}.clip_model")
    path = resolve_path(clip_weights)
    if not get_pretrained_cfg(architecture, clip_weights) and not path.is_file():
        raise RewardError(
            f"{kind}.clip_weights {path}: no such file, and no pretrained tag of {architecture}; "
            f"use one that open_clip.list_pretrained() lists, or a .safetensors, .pt or .bin file"
        )
    return architecture


def embedding_width(architecture: str) -> int:
    """Size of the embeddings of an architecture from `find_architecture`."""
    import open_clip  # noqa: PLC0415

    width: int = open_clip.get_model_config(architecture)["embed_dim"]
    return width


@functools.cache
def clip_bytes(clip_model: str, *, is_image_only: bool) -> int:
    """Size of the weights in fp32, without loading them."""
    import open_clip  # noqa: PLC0415

    architecture = find_architecture(clip_model, key="clip_model")
    level = logging.root.level
    # Suppress the warning that there are no weights, which is intended.
    logging.root.setLevel(logging.ERROR)
    try:
        with torch.device("meta"):
            clip = open_clip.create_model(architecture, load_weights=False, device="meta")
    finally:
        logging.root.setLevel(level)
    network = clip.visual if is_image_only else clip
    tensors = [*network.parameters(), *network.buffers()]
    return sum(each.numel() * each.element_size() for each in tensors)


def load_clip(architecture: str, clip_weights: str, *, key: str) -> Any:
    """Load a model with its weights on the CPU, in float32, frozen and in evaluation mode.

    With weights from a local file, images are normalised with OpenAI's mean and deviation, which
    is right for all models of OpenAI and most of LAION; a tag has its own.

    Args:
        architecture: Name from `find_architecture`.
        clip_weights: A pretrained tag of open_clip, or a .safetensors, .pt or .bin file.
        key: Config key of `clip_weights`, for errors.

    Returns:
        An open_clip model with `visual` and `encode_text`.
    """
    import huggingface_hub  # noqa: PLC0415
    import open_clip  # noqa: PLC0415
    from open_clip.pretrained import get_pretrained_cfg  # noqa: PLC0415
    from transformers import AutoConfig  # noqa: PLC0415

    tag = get_pretrained_cfg(architecture, clip_weights)
    text_tower = open_clip.get_model_config(architecture)["text_cfg"].get("hf_model_name")
    with _refusing(f"{key} {clip_weights!r} of model {architecture!r}"):
        if text_tower is not None:
            # Code from a repository is never run; open_clip does not tell transformers so, which
            # would then ask on the terminal.
            AutoConfig.from_pretrained(text_tower, trust_remote_code=False)
        if tag:
            # Fails at once without a network and a cache; open_clip retries for minutes.
            repository = "/".join(tag["hf_hub"].split("/")[:2])
            huggingface_hub.snapshot_download(repository, allow_patterns="open_clip_config.json")
        else:
            clip_weights = str(resolve_path(clip_weights))
        # Random weights are drawn before they are replaced; fork_rng restores the generator.
        with torch.random.fork_rng(devices=[]):
            clip = open_clip.create_model(architecture, clip_weights, require_pretrained=True)
    return clip.eval().requires_grad_(False)


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    try:
        yield
    # Libraries raise whatever a wrong byte or name leads to.
    except Exception as error:
        cause = textwrap.shorten(describe_refusal(error), _LONGEST_CAUSE)
        raise RewardError(
            f"{what} cannot be loaded ({cause}). Files from the hub are downloaded once into "
            "HF_HOME; without a network, copy HF_HOME from a machine that has one, or use local "
            "files of that model: a .json config, and .safetensors, .pt or .bin weights"
        ) from error
