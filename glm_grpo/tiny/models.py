"""Build the stock GLM-Image classes in miniature, with fresh weights.

Constraints of a miniature: one target token is 32 pixels, `vae_scale_factor * patch_size` is 16,
and there are still 256 preview tokens. `rope_theta` and `mrope_section` make it learn: the width
axis turns fast enough to distinguish columns at head size 32 (GLM-Image's own values only suit head
size 128).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, GlmImageTransformer2DModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    ByT5Tokenizer,
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    GlmImageImageProcessor,
    GlmImageProcessor,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

CODEBOOK = 512
"""Entries of the visual codebook; text token ids start after it and its 16 special ids."""

_SPECIAL_TOKENS = ("<|pad|>", "<|image|>", "<|grid_bos|>", "<|grid_eos|>")
_VISION_WIDTH = 64
_HEAD_SIZE = 32

_CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|image_start|><|image|><|image_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


@dataclass(frozen=True)
class PolicySizes:
    """Sizes of the language model; the defaults are those of the embedded one.

    Attributes:
        codebook: Entries of the visual codebook.
        reserved: Number of ids after the codebook: the first starts an image, the second ends one.
        intermediate_size: Size of the gated layer.
        heads: Attention heads, each of size D / heads.
        key_value_heads: Key and value heads; a divisor of `heads`.
        rope_theta: Base of the rotary frequencies.
        rope_section: Chunks of the frequencies, assigned to time, height and width in turn; their
            sum is half the head size.
    """

    codebook: int = CODEBOOK
    reserved: int = 16
    hidden_size: int = 160
    intermediate_size: int = 384
    layers: int = 4
    heads: int = 5
    key_value_heads: int = 5
    rope_theta: float = 20.0
    rope_section: tuple[int, ...] = (2, 2, 2, 2, 2, 2, 2, 2)

    @property
    def image_start(self) -> int:
        """Id of the token that starts an image."""
        return self.codebook

    @property
    def image_end(self) -> int:
        """Id of the token that ends an image."""
        return self.codebook + 1

    @property
    def vision_vocabulary(self) -> int:
        """Outputs of the head; text ids start here."""
        return self.codebook + self.reserved


TINY = PolicySizes()
"""Sizes of the embedded model."""


def build_processor(sizes: PolicySizes = TINY) -> GlmImageProcessor:
    """Build the stock processor with a byte-level tokenizer.

    Ids 0..511 are the codebook, 512 and 513 start and end an image (like 16384 and 16385 in the
    published model), followed by 14 unused ids, four special tokens and 256 bytes; other sizes are
    analogous.
    """
    names = [f"<|code_{index}|>" for index in range(sizes.codebook)]
    names += ["<|image_start|>", "<|image_end|>"]
    names += [f"<|unused_{index}|>" for index in range(sizes.vision_vocabulary - len(names))]
    names += [*_SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(
        models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|image_start|>",
        eos_token="<|image_end|>",
        padding_side="left",
        extra_special_tokens={
            "image_token": "<|image|>",
            "grid_bos_token": "<|grid_bos|>",
            "grid_eos_token": "<|grid_eos|>",
        },
    )
    image_processor = GlmImageImageProcessor(
        patch_size=16,
        merge_size=1,
        temporal_patch_size=1,
        size={"shortest_edge": 64 * 64, "longest_edge": 512 * 512},
    )
    return GlmImageProcessor(
        image_processor=image_processor, tokenizer=fast, chat_template=_CHAT_TEMPLATE
    )


def build_policy_model(*, seed: int, sizes: PolicySizes = TINY) -> GlmImageForConditionalGeneration:
    """Vision tower, VQ and language model: 1.3 M parameters by default, sdpa attention, fp32."""
    pad = sizes.vision_vocabulary + _SPECIAL_TOKENS.index("<|pad|>")
    config = GlmImageConfig(
        text_config={
            "vocab_size": sizes.vision_vocabulary + len(_SPECIAL_TOKENS) + 256,
            "hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.intermediate_size,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.key_value_heads,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": sizes.rope_theta,
                "mrope_section": list(sizes.rope_section),
            },
            "pad_token_id": pad,
            "eos_token_id": sizes.image_end,
            "vision_vocab_size": sizes.vision_vocabulary,
        },
        vision_config={
            "depth": 1,
            "hidden_size": _VISION_WIDTH,
            "intermediate_size": 128,
            "num_heads": 2,
            "image_size": 64,
            "patch_size": 16,
        },
        vq_config={
            "embed_dim": _VISION_WIDTH,
            "num_embeddings": sizes.codebook,
            "latent_channels": _VISION_WIDTH,
        },
        image_token_id=sizes.vision_vocabulary + _SPECIAL_TOKENS.index("<|image|>"),
        image_start_token_id=sizes.image_start,
        image_end_token_id=sizes.image_end,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GlmImageForConditionalGeneration(config)
    generation = model.generation_config
    generation.do_sample = True
    generation.temperature = 1.0
    generation.top_k = 0
    generation.pad_token_id = pad
    generation.eos_token_id = sizes.image_end
    return model.eval()


def build_vae(*, seed: int) -> AutoencoderKL:
    """Factor 8, 8 latent channels, shaped like GLM-Image's VAE but half as deep."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoencoderKL(
            in_channels=3,
            out_channels=3,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(16, 24, 32, 48),
            layers_per_block=1,
            latent_channels=8,
            norm_num_groups=8,
            sample_size=128,
            mid_block_add_attention=False,
            use_quant_conv=False,
            use_post_quant_conv=False,
            latents_mean=[0.0] * 8,
            latents_std=[1.0] * 8,
            scaling_factor=1.0,
        ).eval()


def build_transformer(*, seed: int) -> GlmImageTransformer2DModel:
    """The decoder: 4 layers, 6 heads of size 32, patches of 2 x 2 latents (64 per image)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GlmImageTransformer2DModel(
            patch_size=2,
            in_channels=8,
            out_channels=8,
            num_layers=4,
            attention_head_dim=_HEAD_SIZE,
            num_attention_heads=6,
            text_embed_dim=64,
            time_embed_dim=96,
            condition_dim=16,
            prior_vq_quantizer_codebook_size=CODEBOOK,
        ).eval()


def build_text_encoder(*, seed: int) -> T5EncoderModel:
    """Build a one-layer glyph encoder over bytes.

    Embeddings start nearly equal: the decoder uses constant glyph embeddings as an absolute anchor
    (its own positions are relative), and random ones disturb it.
    """
    config = T5Config(
        vocab_size=384,
        d_model=64,
        d_kv=16,
        num_heads=4,
        num_layers=1,
        d_ff=128,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = T5EncoderModel(config).eval()
        with torch.no_grad():
            common = torch.randn(1, config.d_model)
            weight = encoder.get_input_embeddings().weight
            weight.copy_(common + 0.02 * torch.randn_like(weight))
    return encoder


def build_glyph_tokenizer() -> ByT5Tokenizer:
    """Bytes as tokens, as in the published model."""
    return ByT5Tokenizer()


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Flow matching with GLM-Image's shift by resolution."""
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        use_dynamic_shifting=True,
        base_shift=0.25,
        max_shift=0.75,
        base_image_seq_len=256,
        time_shift_type="linear",
    )
