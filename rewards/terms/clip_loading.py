"""Find and load CLIP models of open_clip, and embed pictures and prompts with them."""

from __future__ import annotations

import functools
import json
import logging
import pickle
import textwrap
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float32, Int64, UInt8
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import normalize

from rewards.types import RewardError, describe_error
from rewards.unpickling import describe_refusal

# open_clip and transformers are imported in functions, so that configs without CLIP start faster.

ResizeMode = Literal["shortest", "longest"]

_PACKAGE_SCHEME = "pkg://"
_LONGEST_CAUSE = 400  # characters: weights of another model differ in thousands of tensors

_logger = logging.getLogger(__name__)


class PictureEmbedder:
    """Image tower of a CLIP model, with the transform for its pictures.

    Pictures are transformed one by one with open_clip's own transform, using Pillow; a batched
    transform on tensors would round differently.

    Args:
        clip: Model from `load_clip`.
        resize_mode: Which edge of a picture is fitted to the tower's square: `shortest` crops the
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

    def embed(self, pixels: UInt8[Tensor, "N 3 H W"]) -> Float32[Tensor, "N D"]:
        """Embed pictures on the tower's current device; embeddings have length 1."""
        pictures = [Image.fromarray(picture.permute(1, 2, 0).numpy()) for picture in pixels.cpu()]
        inputs = torch.stack([self._transform(picture) for picture in pictures])
        device = next(self.tower.parameters()).device
        return normalize(self.tower(inputs.to(device)), dim=-1)


class PromptEmbedder:
    """Text tower of a CLIP model, with open_clip's tokenizer for it.

    The tokenizer truncates prompts that are too long for the tower, which is logged once.

    Args:
        clip: Model from `load_clip`.
        architecture: Its name from `find_architecture`.
        key: Config key of the architecture, for errors and the log.

    Raises:
        RewardError: The tokenizer cannot be loaded, or knows more tokens than the model.
    """

    def __init__(self, clip: Any, architecture: str, *, key: str) -> None:
        self._clip = clip
        self._key = key
        self._tokenize = _load_tokenizer(architecture, key=key)
        self._has_told_of_cut = False

    def embed(self, prompts: Sequence[str]) -> Float32[Tensor, "N D"]:
        """Embed prompts on the model's current device; embeddings have length 1."""
        # A group shares its prompt, which therefore goes through the tower once.
        texts = list(dict.fromkeys(prompts))
        tokens: Int64[Tensor, "M T"] = self._tokenize(texts)
        if not self._has_told_of_cut:
            self._tell_of_cut(texts, tokens)
        device = next(self._clip.parameters()).device
        embeddings = normalize(self._clip.encode_text(tokens.to(device)), dim=-1)
        return embeddings[[texts.index(prompt) for prompt in prompts]]

    def _tell_of_cut(self, texts: list[str], tokens: Int64[Tensor, "M T"]) -> None:
        # With one more place, a text that fits only gets more padding.
        places = tokens.shape[1]
        roomier = self._tokenize(texts, context_length=places + 1)[:, :places]
        for row in (tokens != roomier).any(dim=1).nonzero().flatten().tolist():
            self._has_told_of_cut = True
            _logger.warning(
                "%s: the model reads %d tokens; the end of longer prompts, such as %r, is ignored "
                "(shown once)",
                self._key,
                places,
                textwrap.shorten(texts[row], 120),
            )
            return


def pair_cosine(
    first: Float32[Tensor, "N D"], second: Float32[Tensor, "N D"]
) -> Float32[Tensor, " N"]:
    """Cosine, -1..1, of each pair of embeddings of length 1."""
    # Rounding errors can exceed the range by about 1e-7.
    return (first * second).sum(dim=-1).clamp(-1.0, 1.0)


def resolve_path(text: str) -> Path:
    """Resolve a path; `pkg://package/relative/path` names a file in a package.

    Raises:
        RewardError: The package does not exist.
    """
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

    Raises:
        RewardError: The architecture or file does not exist, the file is not a model config or uses
            an existing name, or the model is a CoCa.
    """
    import open_clip  # noqa: PLC0415

    architecture = _register(clip_model, key) if clip_model.endswith(".json") else clip_model
    if architecture not in open_clip.list_models():
        raise RewardError(
            f"{key} {clip_model!r} is not an architecture of open_clip; use one of "
            "open_clip.list_models(), such as ViT-L-14-quickgelu, or the path of a .json model "
            "config"
        )
    if "multimodal_cfg" in open_clip.get_model_config(architecture):
        raise RewardError(
            f"{key} {clip_model!r} is a CoCa, whose image tower returns more than an embedding; "
            "use a CLIP or SigLIP architecture, such as ViT-L-14-quickgelu"
        )
    return architecture


def check_clip(clip_model: str, clip_weights: str, *, kind: str) -> str:
    """Find an architecture, and its weights where they are a local file, without loading them.

    Args:
        clip_model: As in `find_architecture`.
        clip_weights: As in `load_clip`; a tag is not looked for, which needs a network.
        kind: Term, for errors.

    Returns:
        Name under which open_clip knows the architecture.

    Raises:
        RewardError: One of them does not exist.
    """
    from open_clip.pretrained import get_pretrained_cfg  # noqa: PLC0415

    architecture = find_architecture(clip_model, key=f"{kind}.clip_model")
    if not get_pretrained_cfg(architecture, clip_weights):
        path = resolve_path(clip_weights)
        if not path.is_file():
            error = FileNotFoundError(f"{path}: no such file")
            raise _unusable_weights(architecture, clip_weights, f"{kind}.clip_weights", error)
    return architecture


def embedding_width(architecture: str) -> int:
    """Size of the embeddings of an architecture from `find_architecture`."""
    import open_clip  # noqa: PLC0415

    width: int = open_clip.get_model_config(architecture)["embed_dim"]
    return width


@functools.cache
def clip_bytes(clip_model: str, *, is_image_only: bool) -> int:
    """Size of the weights in fp32, without loading them.

    Raises:
        RewardError: As for `find_architecture`.
    """
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

    With weights from a local file, pictures are normalised with OpenAI's mean and deviation, which
    is right for all models of OpenAI and most of LAION; a tag has its own.

    Args:
        architecture: Name from `find_architecture`.
        clip_weights: A pretrained tag of open_clip, or a .safetensors, .pt or .bin file.
        key: Config key of `clip_weights`, for errors.

    Returns:
        An open_clip model with `visual` and `encode_text`.

    Raises:
        RewardError: The weights are missing, cannot be downloaded, or belong to another model.
    """
    import open_clip  # noqa: PLC0415
    from open_clip.pretrained import get_pretrained_cfg  # noqa: PLC0415

    if not get_pretrained_cfg(architecture, clip_weights):
        clip_weights = str(resolve_path(clip_weights))
    try:
        _refuse_hub_code(architecture)
        _request_once(architecture, clip_weights)
        # Random weights are drawn before they are replaced; fork_rng restores the generator.
        with torch.random.fork_rng(devices=[]):
            clip = open_clip.create_model(architecture, clip_weights, require_pretrained=True)
    # The last two errors occur because open_clip assumes that a file contains a dict of tensors.
    except (
        OSError,
        RuntimeError,
        EOFError,
        ValueError,
        pickle.UnpicklingError,
        SafetensorError,
        AttributeError,
        StopIteration,
    ) as error:
        raise _unusable_weights(architecture, clip_weights, key, error) from error
    return clip.eval().requires_grad_(False)


def _request_once(architecture: str, clip_weights: str) -> None:
    """Fail at the first request without a network and a cache; open_clip retries for minutes."""
    import huggingface_hub  # noqa: PLC0415
    from open_clip.pretrained import get_pretrained_cfg  # noqa: PLC0415

    if tag := get_pretrained_cfg(architecture, clip_weights):
        huggingface_hub.snapshot_download(_repository(tag), allow_patterns="open_clip_config.json")


def _repository(tag: Mapping[str, str]) -> str:
    """Hub id of a pretrained tag, which may also name a file."""
    return "/".join(tag["hf_hub"].split("/")[:2])


def _refuse_hub_code(architecture: str) -> None:
    """Refuse a transformers text tower with code from a repository, which is never run.

    open_clip does not tell transformers so, which would then ask on the terminal.
    """
    import open_clip  # noqa: PLC0415
    from transformers import AutoConfig  # noqa: PLC0415

    name = open_clip.get_model_config(architecture)["text_cfg"].get("hf_model_name")
    if name is not None:
        AutoConfig.from_pretrained(name, trust_remote_code=False)


def _register(clip_model: str, key: str) -> str:
    import open_clip  # noqa: PLC0415

    path = resolve_path(clip_model)
    if not path.is_file():
        raise RewardError(f"{key} {path}: no such file; write the path of a config")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RewardError(f"{key} {path}: not JSON ({error}); correct the file") from error
    # open_clip registers a config by its file's stem, in one table with its own.
    if open_clip.get_model_config(path.stem) is None:
        open_clip.add_model_config(path)
    if open_clip.get_model_config(path.stem) != config:
        raise RewardError(
            f"{key} {path}: not a model config (embed_dim, vision_cfg, text_cfg), or "
            f"{path.stem!r} is the name of another one; correct or rename the file"
        )
    return path.stem


def _unusable_weights(
    architecture: str, clip_weights: str, key: str, error: Exception
) -> RewardError:
    import open_clip  # noqa: PLC0415
    from open_clip.pretrained import get_pretrained_cfg  # noqa: PLC0415

    cause = textwrap.shorten(describe_refusal(error), _LONGEST_CAUSE)
    problem = f"{key} {clip_weights!r} of model {architecture!r} cannot be loaded ({cause}). "
    tag = get_pretrained_cfg(architecture, clip_weights)
    if tag:
        repository = _repository(tag)
        return RewardError(
            f"{problem}It is downloaded once into HF_HOME. Without a network: download "
            f"https://huggingface.co/{repository} elsewhere (hf download {repository}) and copy "
            f"HF_HOME here, or set {key} to the weights in it, a .safetensors, .pt or .bin file"
        )
    tags = open_clip.list_pretrained_tags_by_model(architecture)
    tagged = (
        f", or one of the tags {tags}, which are downloaded into HF_HOME where there is a network"
    )
    return RewardError(
        f"{problem}Use a local .safetensors, .pt or .bin file of that model{tagged if tags else ''}"
    )


def _load_tokenizer(architecture: str, *, key: str) -> Any:
    import open_clip  # noqa: PLC0415
    from open_clip.tokenizer import SimpleTokenizer  # noqa: PLC0415

    text_config = open_clip.get_model_config(architecture)["text_cfg"]
    # Otherwise transformers asks on the terminal; the given config may set it to true.
    options = {"trust_remote_code": False} if text_config.get("hf_tokenizer_name") else {}
    try:
        tokenizer = open_clip.get_tokenizer(architecture, **options)
    except (OSError, ValueError) as error:
        source = text_config.get("hf_tokenizer_name", architecture)
        cause = textwrap.shorten(describe_error(error), _LONGEST_CAUSE)
        raise RewardError(
            f"{key} {architecture!r}: its tokenizer {source!r} cannot be loaded ({cause}). It is "
            "downloaded once into HF_HOME. Without a network: download "
            f"https://huggingface.co/{source} elsewhere (hf download {source}) and copy HF_HOME "
            "here, or use an architecture whose tokenizer comes with open_clip, such as "
            "ViT-L-14-quickgelu"
        ) from error
    # On an accelerator, a token without a row in the embedding would end the process.
    if (
        isinstance(tokenizer, SimpleTokenizer)
        and text_config.get("vocab_size", tokenizer.vocab_size) < tokenizer.vocab_size
    ):
        raise RewardError(
            f"{key} {architecture!r} has text_cfg.vocab_size {text_config['vocab_size']}; "
            "open_clip's tokenizer "
            f"needs {tokenizer.vocab_size}: use a model that was trained with it, or name the "
            "model's own tokenizer in text_cfg.hf_tokenizer_name"
        )
    return tokenizer
