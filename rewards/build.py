"""From the `reward` section of the config to a scorer; imports only what the config names."""

from __future__ import annotations

import torch

from rewards.base import Reward
from rewards.config import (
    AestheticConfig,
    EasyOcrConfig,
    LpipsConfig,
    RapidOcrConfig,
    RewardConfig,
)
from rewards.ocr import OcrReward, TextReader
from rewards.score import Scorer


def build_scorer(config: RewardConfig, device: torch.device) -> Scorer:
    """Build every term that the config names.

    Args:
        config: A validated section.
        device: Where the networks of the terms are put.

    Returns:
        A scorer whose terms stand in the order of `TermsConfig`.

    Raises:
        RewardError: A term's weights are missing or do not fit.
    """
    terms = config.terms
    rewards: list[Reward] = []
    if terms.lpips is not None:
        rewards.append(_build_lpips(terms.lpips, device))
    if terms.ssim is not None:
        rewards.append(_build_ssim())
    if terms.ocr is not None:
        rewards.append(OcrReward(_build_reader(terms.ocr, device)))
    if terms.aesthetic is not None:
        rewards.append(_build_aesthetic(terms.aesthetic, device))
    weights = terms.weights()
    return Scorer(rewards, [weights[reward.name] for reward in rewards])


def _build_lpips(config: LpipsConfig, device: torch.device) -> Reward:
    from rewards.lpips import LpipsReward  # noqa: PLC0415 - torchvision and lpips take seconds

    return LpipsReward(config.network, pretrained=config.pretrained, device=device)


def _build_ssim() -> Reward:
    from rewards.ssim import SsimReward  # noqa: PLC0415 - torchmetrics takes seconds to import

    return SsimReward()


def _build_reader(config: EasyOcrConfig | RapidOcrConfig, device: torch.device) -> TextReader:
    if isinstance(config, EasyOcrConfig):
        from rewards.ocr_easyocr import EasyOcrReader  # noqa: PLC0415 - only one engine is used

        return EasyOcrReader(config.languages, device=device)
    from rewards.ocr_rapidocr import RapidOcrReader  # noqa: PLC0415 - only one engine is used

    return RapidOcrReader(threads=config.threads, detection_side=config.detection_side)


def _build_aesthetic(config: AestheticConfig, device: torch.device) -> Reward:
    from rewards.aesthetic import AestheticReward  # noqa: PLC0415 - open_clip takes seconds

    return AestheticReward(
        clip_model=config.clip_model,
        clip_weights=config.clip_weights,
        head=config.head,
        device=device,
    )
