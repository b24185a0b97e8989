"""Find and load CLIP models of open_clip; embed pictures and prompts with them."""

from __future__ import annotations

import functools
import json
import logging
import pickle
import textwrap
from collections.abc import Sequence
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

# open_clip and transformers are imported in functions: a config without CLIP need not wait.

ResizeMode = Literal["shortest", "longest"]

_PACKAGE_SCHEME = "pkg://"
_LONGEST_CAUSE = 400  # characters: weights of another model differ in thousands of tensors

_logger = logging.getLogger(__name__)


class PictureEmbedder:
    """The image tower of a CLIP model, with the transform that its pictures go through.

    The transform is open_clip's own, one by one, through Pillow: a batched one on tensors rounds
    differently.

    Args:
        clip: A model that `load_clip` returned.
        resize_mode: Which edge of a picture is fitted to the tower's square: `shortest` cuts off
            what is beyond it, `longest` fills up with black. None: as the weights were published,
            `shortest` for most models and for all local files.
    """

    def __init__(self, clip: Any, *, resize_mode: ResizeMode | None = None) -> None:
        from open_clip.transform import PreprocessCfg, image_transform_v2  # noqa: PLC0415

        self.tower: nn.Module = clip.visual
        options = dict(clip.visual.preprocess_cfg)
        if resize_mode is not None:
            options["resize_mode"] = resize_mode
        self._transform = image_transform_v2(PreprocessCfg(**options), is_train=False)

    def embed(self, pixels: UInt8[Tensor, "N 3 H W"]) -> Float32[Tensor, "N D"]:
        """Embed pictures where the tower is now; embeddings have length 1."""
        pictures = [Image.fromarray(picture.permute(1, 2, 0).numpy()) for picture in pixels.cpu()]
        inputs = torch.stack([self._transform(picture) for picture in pictures])
        device = next(self.tower.parameters()).device
        return normalize(self.tower(inputs.to(device)), dim=-1)


class PromptEmbedder:
    """The text tower of a CLIP model, with the tokenizer that open_clip gives it.

    The tokenizer cuts off what the tower has no place for, which is logged once.

    Args:
        clip: A model that `load_clip` returned.
        architecture: Its name, as `find_architecture` returned it.
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
        """Embed prompts where the model is now; embeddings have length 1."""
        # A group shares its prompt, which then goes through the tower once.
        texts = list(dict.fromkeys(prompts))
        tokens: Int64[Tensor, "M T"] = self._tokenize(texts)
        if not self._has_told_of_cut:
            self._tell_of_cut(texts, tokens)
        device = next(self._clip.parameters()).device
        embeddings = normalize(self._clip.encode_text(tokens.to(device)), dim=-1)
        return embeddings[[texts.index(prompt) for prompt in prompts]]

    def _tell_of_cut(self, texts: list[str], tokens: Int64[Tensor, "M T"]) -> None:
        # With one more place, a text that fits gets padding behind it, and no other change.
        places = tokens.shape[1]
        roomier = self._tokenize(texts, context_length=places + 1)[:, :places]
        for row in (tokens != roomier).any(dim=1).nonzero().flatten().tolist():
            self._has_told_of_cut = True
            _logger.warning(
                "%s: the model reads %d tokens; of longer prompts the end is not read, "
                "such as %r (said once)",
                self._key,
                places,
                textwrap.shorten(texts[row], 120),
            )
            return


def pair_cosine(
    first: Float32[Tensor, "N D"], second: Float32[Tensor, "N D"]
) -> Float32[Tensor, " N"]:
    """Cosine, -1..1, of each pair of embeddings of length 1."""
    # Rounding leaves the range by some 1e-7.
    return (first * second).sum(dim=-1).clamp(-1.0, 1.0)


def resolve_path(text: str) -> Path:
    """Turn a path into one on disk; `pkg://package/relative/path` names a file in a package.

    Raises:
        RewardError: There is no such package.
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
        clip_model: A name of `open_clip.list_models()`, or the path of a .json model config.
        key: Config key that `clip_model` came from, for errors.

    Returns:
        The name under which open_clip knows it.

    Raises:
        RewardError: There is no such architecture or file, the file is no model config or has the
            name of another one, or the model is a CoCa.
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


def embedding_width(architecture: str) -> int:
    """Of the embeddings of an architecture that `find_architecture` returned."""
    import open_clip  # noqa: PLC0415

    width: int = open_clip.get_model_config(architecture)["embed_dim"]
    return width


@functools.cache
def clip_bytes(clip_model: str, *, is_image_only: bool) -> int:
    """Of the weights in fp32, without loading them.

    Raises:
        RewardError: See `find_architecture`.
    """
    import open_clip  # noqa: PLC0415

    architecture = find_architecture(clip_model, key="clip_model")
    level = logging.root.level
    # It warns that there are no weights, which is meant.
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
    """Load a model with its weights: on the CPU, in float32, frozen, for evaluation.

    Pictures for weights from a local file are normalised with OpenAI's mean and deviation, which
    is right for all models of OpenAI and most of LAION; a tag brings its own.

    Args:
        architecture: What `find_architecture` returned.
        clip_weights: A pretrained tag of open_clip, or a .safetensors, .pt or .bin file.
        key: Config key that `clip_weights` came from, for errors.

    Returns:
        A model of open_clip with `visual` and `encode_text`.

    Raises:
        RewardError: The weights are missing, cannot be downloaded, or are of another model.
    """
    import open_clip  # noqa: PLC0415
    from open_clip.pretrained import get_pretrained_cfg  # noqa: PLC0415

    if not get_pretrained_cfg(architecture, clip_weights):
        clip_weights = str(resolve_path(clip_weights))
    try:
        _refuse_hub_code(architecture)
        # Weights are drawn before they are replaced; fork_rng puts the generator back.
        with torch.random.fork_rng(devices=[]):
            clip = open_clip.create_model(architecture, clip_weights, require_pretrained=True)
    # The last two: open_clip takes it for granted that a file holds a dict with tensors.
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


def _refuse_hub_code(architecture: str) -> None:
    """A text tower of transformers may be a repository's own code, which is never run.

    open_clip does not say so to transformers, which then asks on the terminal.
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
    # open_clip knows a config by the stem of its file, in one table with its own.
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
        repository = tag["hf_hub"].strip("/")
        return RewardError(
            f"{problem}It is downloaded once into HF_HOME. Without a network: download "
            f"https://huggingface.co/{repository} elsewhere (hf download {repository}) and bring "
            f"HF_HOME here, or set {key} to the weights in it, a .safetensors, .pt or .bin file"
        )
    tags = open_clip.list_pretrained_tags_by_model(architecture)
    return RewardError(
        f"{problem}Use a local .safetensors, .pt or .bin file of that model, or one of the tags "
        f"{tags}, which are downloaded into HF_HOME where there is a network"
    )


def _load_tokenizer(architecture: str, *, key: str) -> Any:
    import open_clip  # noqa: PLC0415
    from open_clip.tokenizer import SimpleTokenizer  # noqa: PLC0415

    text_config = open_clip.get_model_config(architecture)["text_cfg"]
    # For transformers, which asks on the terminal unless told; the config at hand may say yes.
    options = {"trust_remote_code": False} if text_config.get("hf_tokenizer_name") else {}
    try:
        tokenizer = open_clip.get_tokenizer(architecture, **options)
    except (OSError, ValueError) as error:
        source = text_config.get("hf_tokenizer_name", architecture)
        cause = textwrap.shorten(describe_error(error), _LONGEST_CAUSE)
        raise RewardError(
            f"{key} {architecture!r}: its tokenizer {source!r} cannot be loaded ({cause}). It is "
            f"downloaded once into HF_HOME. Without a network: download "
            f"https://huggingface.co/{source} elsewhere (hf download {source}) and bring HF_HOME "
            "here, or use an architecture whose tokenizer comes with open_clip, such as "
            "ViT-L-14-quickgelu"
        ) from error
    # On an accelerator a token that the model has no row for would end the process.
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
