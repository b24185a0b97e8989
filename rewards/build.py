"""From the `reward` section of the config to a scorer; imports only what the config names."""

from __future__ import annotations

import torch

from rewards.base import Reward
from rewards.config import RewardConfig
from rewards.ocr import OcrReward, TextReader
from rewards.score import Scorer, Term
from rewards.terms_config import (
    AestheticConfig,
    EasyOcrConfig,
    LpipsConfig,
    RapidOcrConfig,
    SsimConfig,
    TermConfig,
)


def build_scorer(config: RewardConfig, device: torch.device) -> Scorer:
    """Build every term that the config names.

    Args:
        config: A validated section.
        device: Where the networks of the terms are put.

    Returns:
        A scorer whose terms stand in the order of the config.

    Raises:
        RewardError: A term's weights are missing or do not fit.
    """
    terms = [
        Term(
            name=name,
            reward=build_reward(options, device),
            weight=options.weight,
            std_floor=options.std_floor,
            timeout_seconds=options.timeout_seconds,
        )
        for name, options in config.terms.items()
    ]
    return Scorer(terms, is_overlapping=config.overlap)


def build_reward(options: TermConfig, device: torch.device) -> Reward:
    """Build one term.

    Raises:
        RewardError: Its weights are missing or do not fit.
    """
    # Imports stand here because each takes seconds, and most configs name a few terms.
    # ruff: noqa: PLC0415
    match options:
        case LpipsConfig():
            from rewards.lpips import LpipsReward

            return LpipsReward(options.network, pretrained=options.pretrained, device=device)
        case SsimConfig():
            from rewards.ssim import SsimReward

            return SsimReward()
        case EasyOcrConfig() | RapidOcrConfig():
            return OcrReward(
                _build_reader(options, device),
                is_case_sensitive=options.case_sensitive,
                extra_text_penalty=options.extra_text_penalty,
            )
        case AestheticConfig():
            from rewards.aesthetic import AestheticReward

            return AestheticReward(
                clip_model=options.clip_model,
                clip_weights=options.clip_weights,
                head=options.head,
                device=device,
            )
        case _:
            raise NotImplementedError(f"{type(options).__name__} has no class that scores")


def _build_reader(config: EasyOcrConfig | RapidOcrConfig, device: torch.device) -> TextReader:
    if isinstance(config, EasyOcrConfig):
        from rewards.ocr_easyocr import EasyOcrReader

        return EasyOcrReader(config.languages, device=device)
    from rewards.ocr_rapidocr import RapidOcrReader

    return RapidOcrReader(threads=config.threads, detection_side=config.detection_side)
