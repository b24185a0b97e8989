"""Stock detectors of random weights, saved as transformers saves them."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import (
    BertConfig,
    BertTokenizer,
    CLIPTokenizer,
    DFineConfig,
    DFineForObjectDetection,
    GroundingDinoConfig,
    GroundingDinoForObjectDetection,
    GroundingDinoImageProcessor,
    GroundingDinoProcessor,
    HGNetV2Config,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    Owlv2Config,
    Owlv2ForObjectDetection,
    Owlv2ImageProcessor,
    Owlv2Processor,
    PreTrainedModel,
    ResNetConfig,
    RTDetrConfig,
    RTDetrForObjectDetection,
    RTDetrResNetConfig,
    RTDetrV2Config,
    RTDetrV2ForObjectDetection,
    SwinConfig,
)

LABELS = ("circle", "square", "star")
_NAMES = {"id2label": dict(enumerate(LABELS)), "label2id": {x: i for i, x in enumerate(LABELS)}}
_STAGES = ["stage1", "stage2", "stage3", "stage4"]
OWL_SIDE = 64
WORDS = ("red", "star", "circle", "fire", "hydrant")
"""Words that GroundingDINO's tokenizer knows: token i + 1 is word i."""


def save(folder: Path, kind: str) -> Path:
    """Save a detector and the processor that it needs."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        _SAVE[kind](folder / kind)
    return folder / kind


def patches(count: int, height: int, width: int) -> UInt8[Tensor, "N 3 H W"]:
    """Grey images with a patch of coarse noise, which strides do not average away."""
    generator = torch.Generator().manual_seed(7)
    coarse = torch.randint(0, 256, (count, 3, 4, 4), generator=generator).float()
    rows, columns = slice(height // 4, height // 2), slice(width // 3, 2 * width // 3)
    images = torch.full((count, 3, height, width), 128.0)
    size = images[..., rows, columns].shape[2:]
    images[..., rows, columns] = interpolate(coarse, size, mode="nearest")
    return images.to(torch.uint8)


def _spread(model: PreTrainedModel, part: str) -> None:
    """Draw a head's weights from a wider distribution, so that its outputs differ."""
    for name, weight in model.named_parameters():
        if part in name:
            torch.nn.init.normal_(weight)


def _save_mask2former(folder: Path) -> None:
    body = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 8, 8],
        depths=[1] * 4,
        layer_type="basic",
        out_features=_STAGES,
    )
    config = Mask2FormerConfig(
        backbone_config=body,
        hidden_dim=32,
        feature_size=32,
        mask_feature_size=32,
        encoder_feedforward_dim=16,
        dim_feedforward=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        num_queries=36,  # with three classes more than the 100 pairs that count
        **_NAMES,
    )
    model = Mask2FormerForUniversalSegmentation(config)
    _spread(model, "class_predictor")
    _spread(model, "mask_embedder")
    _make_sparse(model)
    model.save_pretrained(folder)


@torch.no_grad()
def _make_sparse(model: Mask2FormerForUniversalSegmentation) -> None:
    """Scale logits of masks to some units, and subtract five of them."""
    features = model.model.pixel_level_module.decoder.mask_projection
    features.weight *= 0.05
    features.bias *= 0.05
    features.weight[-1], features.bias[-1] = 0.0, 1.0
    masks = model.model.transformer_module.decoder.mask_predictor.mask_embedder.get_submodule("2.0")
    masks.weight[-1], masks.bias[-1] = 0.0, -5.0


def _real_time_options(hidden: int) -> dict[str, object]:
    return {
        "freeze_backbone_batch_norms": False,
        "feat_strides": [8, 16, 32],
        "encoder_hidden_dim": hidden,
        "d_model": hidden,
        "decoder_in_channels": [hidden] * 3,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "hidden_expansion": 0.5,
        "num_queries": 12,
        "num_denoising": 0,
        **_NAMES,
    }


def _save_rt_detr(config_class: type, model_class: type) -> Callable[[Path], None]:
    def save_model(folder: Path) -> None:
        body = RTDetrResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 8, 16, 16],
            depths=[1] * 4,
            layer_type="basic",
            out_features=_STAGES[1:],
        )
        config = config_class(
            backbone_config=body, encoder_in_channels=[8, 16, 16], **_real_time_options(16)
        )
        model = model_class(config)
        # Boxes are anchors 8 pixels apart. They are made larger, so that neighbours overlap.
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "decoder.bbox_embed" in name and name.endswith("layers.2.bias"):
                    weight[2:] = 1.0
        model.save_pretrained(folder)

    return save_model


def _save_d_fine(folder: Path) -> None:
    body = HGNetV2Config(
        embedding_size=8,
        depths=[1] * 4,
        hidden_sizes=[8, 16, 16, 16],
        stem_channels=[3, 8, 8],
        stage_in_channels=[8, 8, 16, 16],
        stage_mid_channels=[8] * 4,
        stage_out_channels=[8, 16, 16, 16],
        stage_num_blocks=[1] * 4,
        stage_numb_of_layers=[1] * 4,
        out_features=_STAGES[1:],
    )
    options = _real_time_options(16)
    config = DFineConfig(backbone_config=body, encoder_in_channels=[16, 16, 16], **options)
    DFineForObjectDetection(config).save_pretrained(folder)


def _save_owlv2(folder: Path) -> None:
    letters = [*string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase)]
    tokens = ["!", *letters, "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tower = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    text = {"vocab_size": len(tokens), "max_position_embeddings": 40, **tower}
    ends = {"bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 1, "pad_token_id": 0}
    vision = {"image_size": OWL_SIDE, "patch_size": 16, **tower}
    config = Owlv2Config(text_config=text | ends, vision_config=vision, projection_dim=16)
    Owlv2ForObjectDetection(config).save_pretrained(folder)
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=[], pad_token="!")
    images = Owlv2ImageProcessor(size={"height": OWL_SIDE, "width": OWL_SIDE})
    Owlv2Processor(images, tokenizer).save_pretrained(folder)


def _save_grounding_dino(folder: Path) -> None:
    body = SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1, 1],
        num_heads=[1, 2, 2],
        window_size=4,
        out_features=["stage2", "stage3"],
    )
    text = BertConfig(
        vocab_size=1030,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
    )
    config = GroundingDinoConfig(
        backbone_config=body,
        text_config=text,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        num_queries=9,
        num_feature_levels=3,
        max_text_len=16,
    )
    GroundingDinoForObjectDetection(config).save_pretrained(folder)
    # The model knows these tokens by the ids that BERT gives them.
    tokens = [f"[unused{index}]" for index in range(1030)]
    tokens[1 : 1 + len(WORDS)] = WORDS
    tokens[0], tokens[100], tokens[101], tokens[102] = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
    tokens[103], tokens[1012], tokens[1029] = "[MASK]", ".", "?"
    tokenizer = BertTokenizer(vocab={token: index for index, token in enumerate(tokens)})
    images = GroundingDinoImageProcessor(size={"shortest_edge": 64, "longest_edge": 96})
    GroundingDinoProcessor(images, tokenizer).save_pretrained(folder)


_SAVE: dict[str, Callable[[Path], None]] = {
    "mask2former": _save_mask2former,
    "rt_detr": _save_rt_detr(RTDetrConfig, RTDetrForObjectDetection),
    "rt_detr_v2": _save_rt_detr(RTDetrV2Config, RTDetrV2ForObjectDetection),
    "d_fine": _save_d_fine,
    "owlv2": _save_owlv2,
    "grounding_dino": _save_grounding_dino,
}
