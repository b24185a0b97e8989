"""Predicted aesthetic rating: a CLIP image embedding and a small head on it."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import open_clip
import torch
from jaxtyping import Float, Float32, UInt8
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import normalize

from rewards.types import Prompt, RewardError

_PACKAGE_SCHEME = "pkg://"
_LOWEST_RATING, _HIGHEST_RATING = 1.0, 10.0
_LAYER_KEY = re.compile(r"(layers\.(?P<number>\d+)\.)?(?P<kind>weight|bias)")


class AestheticReward:
    """A rating from 1 to 10, predicted from the picture alone, mapped to 0..1 and clamped there.

    The picture's CLIP embedding, scaled to length 1, goes through a head: LAION's linear one
    (https://github.com/LAION-AI/aesthetic-predictor) or its MLP
    (https://github.com/christophschuhmann/improved-aesthetic-predictor). Pictures are prepared by
    open_clip's own transform, one by one, through Pillow: a batched one on tensors rounds
    differently.

    Args:
        clip_model: An architecture of open_clip, or the path of a model config in its JSON format.
        clip_weights: A pretrained tag of open_clip, or a local file.
        head: A local file, see `load_head`.
        device: Where embedding and head are put.

    Raises:
        RewardError: A model, its weights or the head is missing, cannot be downloaded or does not
            fit the others.
    """

    def __init__(
        self, *, clip_model: str, clip_weights: str, head: str, device: torch.device
    ) -> None:
        architecture = _find_architecture(clip_model)
        width = open_clip.get_model_config(architecture)["embed_dim"]
        # The head first: it is small, and tells of a mistake before gigabytes are loaded.
        self._head = load_head(resolve_path(head), width=width).to(device)
        clip = _load_clip(architecture, clip_weights)
        preprocess = PreprocessCfg(**clip.visual.preprocess_cfg)
        self._prepare = image_transform_v2(preprocess, is_train=False)
        # The text tower is not kept: a picture is embedded by the image tower alone.
        self._visual: nn.Module = clip.visual.to(device).eval().requires_grad_(False)

    def applies_to(self, prompt: Prompt) -> bool:
        """Applies to every prompt: nothing but the picture is looked at."""
        return True

    @torch.no_grad()
    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        """Rate each picture; the prompts are not looked at."""
        pictures = [Image.fromarray(picture.permute(1, 2, 0).numpy()) for picture in pixels.cpu()]
        inputs = torch.stack([self._prepare(picture) for picture in pictures])
        device = next(self._visual.parameters()).device
        embeddings = normalize(self._visual(inputs.to(device)), dim=-1)
        rating: Tensor = self._head(embeddings)
        return to_unit_score(rating.reshape(len(prompts)))

    def modules(self) -> tuple[nn.Module, ...]:
        """Image tower and head."""
        return (self._visual, self._head)


def to_unit_score(rating: Float32[Tensor, " N"]) -> Float32[Tensor, " N"]:
    """Map ratings from 1..10 to 0..1, clamped."""
    return ((rating - _LOWEST_RATING) / (_HIGHEST_RATING - _LOWEST_RATING)).clamp(0.0, 1.0)


def load_head(path: Path, *, width: int) -> nn.Sequential:
    """Load linear layers, applied one after the other to an embedding of `width` numbers.

    Known files: a state dict of one linear layer (`weight` [1, D], `bias` [1]: LAION v1, and the
    .safetensors form), or of several under `layers.<n>.` (LAION v2; there is no activation between
    its layers, and its dropout is for training only).

    Args:
        path: A .safetensors file, or a .pth file that is loaded as tensors only.
        width: Of the embedding.

    Raises:
        RewardError: The file is missing, is none of these, or is made for another embedding.
    """
    layers = _group_layers(_read_tensors(path), path)
    shapes = [tuple(weight.shape) for weight, _ in layers]
    inputs, outputs = [shape[1] for shape in shapes], [shape[0] for shape in shapes]
    if [width, *outputs] != [*inputs, 1]:
        raise RewardError(
            f"aesthetic.head {path} has layers of shape {shapes} (out, in); it must lead from the "
            f"{width} numbers of the embedding of aesthetic.clip_model to 1: use the head that was "
            "trained on this model"
        )
    head = nn.Sequential(*(_linear(weight, bias) for weight, bias in layers))
    return head.eval().requires_grad_(False)


def resolve_path(text: str) -> Path:
    """Turn a path into one on disk; `pkg://package/relative/path` names a file in a package.

    Raises:
        RewardError: There is no such package.
    """
    if not text.startswith(_PACKAGE_SCHEME):
        return Path(text).expanduser()
    package, _, relative = text.removeprefix(_PACKAGE_SCHEME).partition("/")
    try:
        return Path(str(files(package).joinpath(relative)))
    except ModuleNotFoundError as error:
        raise RewardError(
            f"{text}: no package {package!r} is installed; write {_PACKAGE_SCHEME}package/path "
            "with the name that Python imports, or a plain path"
        ) from error


def _find_architecture(clip_model: str) -> str:
    if not clip_model.endswith(".json"):
        if clip_model not in open_clip.list_models():
            raise RewardError(
                f"aesthetic.clip_model {clip_model!r} is not an architecture of open_clip; use one "
                "of open_clip.list_models(), such as ViT-L-14-quickgelu, or the path of a .json "
                "model config"
            )
        return clip_model
    path = resolve_path(clip_model)
    if not path.is_file():
        raise RewardError(f"aesthetic.clip_model {path}: no such file; write the path of a config")
    # open_clip knows a config by the stem of its file, in one table with its own.
    registered = open_clip.get_model_config(path.stem)
    if registered is None:
        open_clip.add_model_config(path)
        registered = open_clip.get_model_config(path.stem)
    if registered != json.loads(path.read_text(encoding="utf-8")):
        raise RewardError(
            f"aesthetic.clip_model {path}: not a model config (embed_dim, vision_cfg, text_cfg), "
            f"or {path.stem!r} is the name of another one; correct or rename the file"
        )
    return path.stem


def _load_clip(architecture: str, clip_weights: str) -> Any:
    if clip_weights not in open_clip.list_pretrained_tags_by_model(architecture):
        clip_weights = str(resolve_path(clip_weights))
    try:
        return open_clip.create_model(architecture, clip_weights, require_pretrained=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, SafetensorError) as error:
        raise RewardError(
            f"aesthetic.clip_weights {clip_weights!r} of model {architecture!r} cannot be loaded "
            f"({error}). Use a local .safetensors, .pt or .bin file of that model, or one of the "
            f"tags {open_clip.list_pretrained_tags_by_model(architecture)}, which are downloaded "
            "into HF_HOME where there is a network"
        ) from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        raise RewardError(
            f"aesthetic.head {path} cannot be read as tensors ({error}); use the .pth file of a "
            "LAION predictor, or a .safetensors file with weight and bias"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(part, Tensor) for part in state.values()):
        raise RewardError(f"aesthetic.head {path} holds no state dict; save module.state_dict()")
    return state


def _group_layers(state: dict[str, Tensor], path: Path) -> list[tuple[Tensor, Tensor]]:
    layers: dict[int, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        match = _LAYER_KEY.fullmatch(key)
        if match is None or tensor.ndim != (2 if match["kind"] == "weight" else 1):
            raise _unknown_head(state, path)
        layers.setdefault(int(match["number"] or 0), {})[match["kind"]] = tensor
    if not layers or any(layer.keys() != {"weight", "bias"} for layer in layers.values()):
        raise _unknown_head(state, path)
    return [(layers[number]["weight"], layers[number]["bias"]) for number in sorted(layers)]


def _unknown_head(state: dict[str, Tensor], path: Path) -> RewardError:
    found = ", ".join(f"{key} {list(tensor.shape)}" for key, tensor in sorted(state.items()))
    return RewardError(
        f"aesthetic.head {path} holds {found or 'nothing'}; it must hold weight [out, in] and bias "
        "[out] of one linear layer, or of several as layers.<n>.weight and layers.<n>.bias"
    )


def _linear(weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"]) -> nn.Linear:
    # On the meta device nothing is drawn from the global generator.
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.load_state_dict({"weight": weight.float(), "bias": bias.float()}, assign=True)
    return layer
