from dataclasses import replace

import pytest
import torch

from glm_grpo.models.glm_image.files import PUBLISHED_ID
from glm_grpo.models.glm_image.planner import (
    GlmImagePlanner,
    PartConfigs,
    read_part_configs,
)
from glm_grpo.plan.memory import read_bytes
from glm_grpo.tiny.models import PolicySizes, build_policy_model
from tests.factories import tiny_config


def test_decoder_work_counts_every_matrix_and_convolution():
    parts = replace(
        read_part_configs(PUBLISHED_ID),
        transformer={
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "num_attention_heads": 1,
            "attention_head_dim": 8,
            "text_embed_dim": 8,
            "time_embed_dim": 8,
            "condition_dim": 4,
            "prior_vq_quantizer_codebook_size": 16,
        },
        vae={
            "block_out_channels": (4,),
            "down_block_types": ("DownEncoderBlock2D",),
            "up_block_types": ("UpDecoderBlock2D",),
            "layers_per_block": 1,
            "latent_channels": 4,
            "norm_num_groups": 2,
            "mid_block_add_attention": False,
            "use_quant_conv": False,
            "use_post_quant_conv": False,
        },
    )
    transformer_flops, vae_flops = GlmImagePlanner(parts).decoder_flops(4, 4)
    # 4 patches of 2 x 2 x 4 numbers, width 8. 2 operations an entry and patch: in 16 x 8, prior
    # 2 x 8 x 8, attention 4 x 8 x 8, feed-forward 2 x 8 x 32, out 8 x 16; and 4 x 4 x 4 pairs x 8.
    of_patches = 2 * 4 * (128 + 128 + 256 + 512 + 128) + 4 * 16 * 8
    # Once an image: time 2 x 8 x 8, condition 16 x 8 + 8 x 8, the norms 8 x 96 and 8 x 16.
    of_images = 2 * (128 + 192 + 768 + 128)
    assert transformer_flops == of_patches + of_images
    # 16 pixels; convolutions of 3 x 3: nine of 4 x 4 channels (in, two blocks of four), out 4 x 3.
    assert vae_flops == 2 * 16 * 9 * (9 * 16 + 12)


def test_token_step_does_not_read_the_embedding_of_which_rows_are_looked_up():
    sizes = PolicySizes(codebook=64, layers=2)
    model = build_policy_model(seed=0, sizes=sizes)
    language = GlmImagePlanner(PartConfigs(model.config.to_dict(), {}, {}, {})).language
    inner, head = model.model.language_model, model.lm_head.weight
    embedding = inner.embed_tokens.weight.numel()
    weights = sum(parameter.numel() for parameter in inner.parameters())
    assert language.head_entries == 64 * sizes.hidden_size
    assert len(head) > 64
    read = read_bytes(language, tiny_config("model.adapter=null").model)
    assert read == 4 * (weights - embedding + language.head_entries)
    vectors = sum(p.numel() for p in inner.parameters() if p.dim() == 1)
    assert language.layer_entries == weights - embedding - vectors
    assert language.attention_width == 2 * sizes.hidden_size


def test_token_step_of_the_published_model_reads_its_sizes():
    bf16 = tiny_config("model.dtype=bfloat16", "model.adapter={rank: 32, alpha: 64.0}").model
    language = GlmImagePlanner(read_part_configs(PUBLISHED_ID)).language
    # 8.847 B less 0.69 B of the embedding, and 95 M entries of adapters, read in bf16.
    assert language.layer_entries == pytest.approx(8.16e9, rel=1e-3)
    assert read_bytes(language, bf16) == pytest.approx(2 * (8.225e9 + 95e6), rel=1e-3)
    assert language.cache_bytes(torch.bfloat16) == 40_960
