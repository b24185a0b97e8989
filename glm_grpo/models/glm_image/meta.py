"""Run GLM-Image on torch's meta device, to count every byte without allocating any."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, GlmImageTransformer2DModel
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    T5Config,
    T5EncoderModel,
)

from glm_grpo.errors import ConfigError
from glm_grpo.models.glm_image.fast import token_scores
from glm_grpo.models.glm_image.model_folder import damage_named, read_config
from glm_grpo.models.glm_image.quantization import BLOCK, KEPT_MODULES, SCALES_BLOCK, hold_in_8_bits

META = torch.device("meta")
"""Device whose tensors have only a shape and a dtype."""

PUBLISHED_ID = "zai-org/GLM-Image"
"""Hub id of the model whose sizes are known without its files."""

_PUBLISHED: dict[str, dict[str, Any]] = {
    # Values of the published config.json files that differ from the defaults of the class.
    "vision_language_encoder": {
        "text_config": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [8, 12, 12],
                "partial_rotary_factor": 0.5,
            }
        }
    },
    "transformer": {"num_layers": 30, "num_attention_heads": 32, "attention_head_dim": 128},
    "vae": {
        "sample_size": 1024,
        "block_out_channels": (128, 512, 1024, 1024),
        "layers_per_block": 3,
        "latent_channels": 16,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "mid_block_add_attention": False,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    },
    "text_encoder": {
        "vocab_size": 384,
        "d_model": 1472,
        "d_kv": 64,
        "d_ff": 3584,
        "num_layers": 12,
        "num_heads": 6,
        "feed_forward_proj": "gated-gelu",
    },
}


class MetaMemory(TorchDispatchMode):
    """Counts the bytes of all meta tensors that operations create, until Python frees them.

    Tensors that existed before do not count. Neither do scratch space inside operations, and memory
    that a caching allocator keeps or loses between blocks.

    Attributes:
        live_bytes: Bytes at this moment.
        peak_bytes: Most bytes at any moment.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation and record the storages it created."""
        # A view of a weight takes no memory: storages of the inputs are already known.
        for tensor in _meta_tensors((args, kwargs)):
            self._note(tensor, 0)
        out = func(*args, **(kwargs or {}))
        for tensor in _meta_tensors(out):
            self._note(tensor, tensor.untyped_storage().nbytes())
        return out

    def _note(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = size
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as on devices with a fused kernel; the meta device would use the plain one."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # Fused kernels convert a mask to the queries' dtype and keep it for the backward pass.
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask, 0)
    attended: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return attended


def _few_rows(chunks: token_scores._Chunks) -> list[slice]:
    """Return the first chunk, the second (which meets the first one's leftovers), and the last.

    The others are like the second. Their number grows with the tokens of a micro-batch, and each
    takes as long as any other.
    """
    size, num_tokens = chunks._size, len(chunks._hidden)
    last = (num_tokens - 1) // size * size
    starts = sorted({0, min(size, last), last})
    return [slice(start, min(start + size, num_tokens)) for start in starts]


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    stock = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, stock)


@contextmanager
def built_on_meta() -> Iterator[None]:
    """Create modules without values, whose random initialisation would take most of the time."""
    with META, _replaced(nn.init, "kaiming_uniform_", lambda tensor, *_, **__: tensor):
        yield


@contextmanager
def measured_on_meta() -> Iterator[MetaMemory]:
    """Run everything inside on meta tensors and count their bytes.

    Functions are replaced rather than intercepted by a torch mode, because backward passes leave
    such modes, and checkpointing recomputes attention in them.
    """
    memory = MetaMemory()
    # The module replaces its own class on import, which type checkers cannot see.
    config: Any = fx_config
    with (
        # Assume that a boolean index selects all entries, the maximum.
        config.patch(meta_nonzero_assume_all_nonzero=True),
        _replaced(nn.functional, "scaled_dot_product_attention", _attend),
        _replaced(token_scores._Chunks, "rows", _few_rows),
        memory,
    ):
        yield memory


def module_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of all weights and buffers."""
    tensors = {id(tensor): tensor for module in modules for tensor in _weights_and_buffers(module)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def pinned_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes in pinned CPU memory, where torch rounds each tensor up to a power of two."""
    sizes = [
        tensor.numel() * tensor.element_size()
        for module in modules
        for tensor in _weights_and_buffers(module)
    ]
    return sum(1 << (size - 1).bit_length() for size in sizes if size)


def _weights_and_buffers(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _meta_tensors(values: object) -> Iterator[Tensor]:
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and value.device.type == META.type:
            yield value


@dataclass(frozen=True)
class PartConfigs:
    """The config.json of each part, as plain values.

    Attributes:
        language: Config of the language model with its vision tower.
    """

    language: dict[str, Any]
    transformer: dict[str, Any]
    vae: dict[str, Any]
    text_encoder: dict[str, Any]

    @property
    def num_layers(self) -> int:
        """Decoder layers of the language model."""
        return GlmImageConfig.from_dict(self.language).text_config.num_hidden_layers


def read_part_configs(path: str) -> PartConfigs:
    """Read the configs of a folder in the diffusers layout, or of the published model.

    Args:
        path: A folder, or the published model's hub id.

    Raises:
        ConfigError: The path is neither.
        ModelError: A part's config.json is missing, damaged, or describes no model that can be
            built.
    """
    folder = Path(path)
    if path == PUBLISHED_ID and not folder.is_dir():
        return _part_configs(_PUBLISHED)
    if not folder.is_dir():
        raise ConfigError(
            f"model.path is {path!r}: there is no such folder, and without one only the "
            f"sizes of {PUBLISHED_ID} are known; give a folder with the config.json of every part "
            f"(`hf download {path} --include '*/config.json' --local-dir FOLDER`), which needs no "
            "weights"
        )
    configs = _part_configs({part: read_config(folder, part) for part in _PUBLISHED})
    for part in _PUBLISHED:
        with damage_named(folder / part / "config.json"):
            build_part(configs, part)
    return configs


def trained_side(path: str) -> int | None:
    """Side in pixels of the model's training images: `sample_size` of its VAE.

    Args:
        path: A folder in the diffusers layout, or a hub id.

    Returns:
        None if no config contains it, as for a hub id other than the published one.

    Raises:
        ModelError: The VAE's config.json is damaged.
    """
    folder = Path(path)
    if (folder / "vae" / "config.json").is_file():
        return read_config(folder, "vae").get("sample_size")
    return _PUBLISHED["vae"]["sample_size"] if path == PUBLISHED_ID else None


def _part_configs(parts: dict[str, dict[str, Any]]) -> PartConfigs:
    return PartConfigs(
        language=parts["vision_language_encoder"],
        transformer=parts["transformer"],
        vae=parts["vae"],
        text_encoder=parts["text_encoder"],
    )


def build_part(configs: PartConfigs, part: str) -> Any:
    """Build a part without values, in fp32; `part` is a name in `model_index.json`."""
    with built_on_meta():
        match part:
            case "vision_language_encoder":
                return GlmImageForConditionalGeneration(GlmImageConfig.from_dict(configs.language))
            case "transformer":
                return GlmImageTransformer2DModel.from_config(configs.transformer)
            case "vae":
                return AutoencoderKL.from_config(configs.vae)
            case _:
                return T5EncoderModel(T5Config.from_dict(configs.text_encoder))


def build_language_model(
    config: dict[str, Any], dtype: torch.dtype, *, layers: int | None = None
) -> GlmImageForConditionalGeneration:
    """Build language model, vision tower and head.

    Args:
        config: Contents of its config.json.
        layers: Number of decoder layers, with one layer in the vision tower; None: as in the
            config.
    """
    settings = GlmImageConfig.from_dict(config)
    if layers is not None:
        settings.text_config.num_hidden_layers = layers
        # Never used: only text is read.
        settings.vision_config.depth = 1
    with built_on_meta():
        return GlmImageForConditionalGeneration(settings).to(dtype).eval()


def build_decoder(
    configs: PartConfigs, dtype: torch.dtype, is_in_8_bits: bool = False
) -> tuple[Any, Any, nn.Module]:
    """Build transformer, VAE and glyph encoder, in this order.

    Args:
        is_in_8_bits: Whether the transformer's weights are stored in 8 bits.
    """
    logger = logging.getLogger("diffusers.models.modeling_utils")
    level = logger.level
    # Suppresses its message that no module is kept in fp32.
    logger.setLevel(logging.ERROR)
    transformer = build_part(configs, "transformer").to(dtype)
    vae = build_part(configs, "vae").to(dtype)
    encoder = build_part(configs, "text_encoder").to(dtype)
    if is_in_8_bits:
        hold_in_8_bits(transformer)
    logger.setLevel(level)
    return transformer.eval(), vae.eval(), encoder.eval()


class MetaLinear4bit(nn.Linear):
    """A 4-bit matrix with its scales; a product holds the full matrix while it runs.

    Its sizes equal those of bitsandbytes' layer, which need not be installed; tests compare them.

    Args:
        linear: Layer to replace.
    """

    def __init__(self, linear: nn.Linear) -> None:
        device = linear.weight.device
        # Its own matrix never has the full size.
        super().__init__(1, 1, bias=False, device=device)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        entries = self.in_features * self.out_features
        blocks = math.ceil(entries / BLOCK)
        packed = torch.empty(math.ceil(entries / 2), 1, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("scales", torch.empty(blocks, dtype=torch.uint8, device=device))
        # In fp32: scales of the scales, the two tables of values, the mean of the scales.
        singles = math.ceil(blocks / SCALES_BLOCK) + 16 + 256 + 1
        self.register_buffer("singles", torch.empty(singles, device=device))

    def forward(self, states: Tensor) -> Tensor:
        """Like `nn.Linear`."""
        product: Tensor = _Product.apply(states, self)
        return product if self.bias is None else product + self.bias


class _Product(torch.autograd.Function):
    """Keeps the packed matrix for the backward pass, not the full one it multiplied by."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, layer: MetaLinear4bit) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(states, _unpacked(layer, states))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ _unpacked(ctx.layer, gradient), None


def _unpacked(layer: MetaLinear4bit, like: Tensor) -> Tensor:
    return like.new_empty(layer.out_features, layer.in_features)


def quantize_on_meta(model: nn.Module) -> None:
    """Replace the matrices that `options_for_4_bits` names."""
    for name, module in [*model.named_modules()]:
        if type(module) is nn.Linear and not name.startswith(KEPT_MODULES):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, MetaLinear4bit(module))
