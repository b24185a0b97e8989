"""From the `reward` section of the config to a scorer; imports only what the config names."""

# Imports of terms stand in functions: each takes seconds, and most configs name a few terms.
# ruff: noqa: PLC0415

from __future__ import annotations

import os

import torch

from rewards.base import Reward
from rewards.config import RewardConfig
from rewards.score import Scorer, Term
from rewards.terms.ocr import OcrReward, TextReader
from rewards.terms_config import (
    AestheticConfig,
    ClipImageConfig,
    ClipScoreConfig,
    CustomConfig,
    EasyOcrConfig,
    HpsConfig,
    LpipsConfig,
    PickScoreConfig,
    PsnrConfig,
    RapidOcrConfig,
    RemoteConfig,
    SsimConfig,
    TermConfig,
    VlmJudgeConfig,
)
from rewards.unpickling import loads_tensors_alone


def build_scorer(
    config: RewardConfig, device: torch.device, *, process_device: torch.device | None = None
) -> Scorer:
    """Build every term that the config names.

    Args:
        config: A validated section.
        device: Where the networks of the terms are put.
        process_device: Where those of terms in a process of their own are put, which no one can
            move afterwards; None for the same.

    Returns:
        A scorer whose terms stand in the order of the config.

    Raises:
        RewardError: A term's weights are missing or do not fit.
    """
    terms = [
        Term(
            name=name,
            reward=_build_where_asked(name, options, device, process_device or device),
            weight=options.weight,
            std_floor=options.std_floor,
            timeout_seconds=options.timeout_seconds,
        )
        for name, options in config.terms.items()
    ]
    return Scorer(terms, is_overlapping=config.overlap)


def _build_where_asked(
    name: str, options: TermConfig, device: torch.device, process_device: torch.device
) -> Reward:
    if options.run_in == "thread":
        return build_reward(options, device)
    from rewards.remote.process import ProcessReward

    return ProcessReward(
        options.model_dump(mode="json"),
        name=name,
        needs=options.needs(),
        device=process_device,
        timeout_seconds=options.timeout_seconds,
    )


def build_reward(options: TermConfig, device: torch.device) -> Reward:
    """Build one term; files of weights are loaded as tensors alone.

    Raises:
        RewardError: Its weights are missing or do not fit.
    """
    if isinstance(options, CustomConfig):
        from rewards.terms.custom import CustomReward

        # The user's own program, which loads what it likes.
        return CustomReward(options.function, needs=options.needs())
    with loads_tensors_alone():
        return _build_own(options, device)


def _build_own(options: TermConfig, device: torch.device) -> Reward:
    match options:
        case LpipsConfig():
            from rewards.terms.lpips import LpipsReward

            return LpipsReward(options.network, pretrained=options.pretrained, device=device)
        case SsimConfig():
            from rewards.terms.ssim import SsimReward

            return SsimReward()
        case EasyOcrConfig() | RapidOcrConfig():
            return OcrReward(
                _build_reader(options, device),
                is_case_sensitive=options.case_sensitive,
                extra_text_penalty=options.extra_text_penalty,
            )
        case AestheticConfig():
            from rewards.terms.aesthetic import AestheticReward

            return AestheticReward(
                clip_model=options.clip_model,
                clip_weights=options.clip_weights,
                head=options.head,
                device=device,
            )
        case PsnrConfig():
            from rewards.terms.psnr import PsnrReward

            return PsnrReward()
        case ClipScoreConfig():
            from rewards.terms.clip import ClipScoreReward

            return ClipScoreReward(
                clip_model=options.clip_model, clip_weights=options.clip_weights, device=device
            )
        case ClipImageConfig():
            from rewards.terms.clip import ClipImageReward

            return ClipImageReward(
                clip_model=options.clip_model, clip_weights=options.clip_weights, device=device
            )
        case PickScoreConfig():
            from rewards.terms.pick_score import PickScoreReward

            return PickScoreReward(model=options.model, processor=options.processor, device=device)
        case HpsConfig():
            from rewards.terms.hps import HpsReward

            return HpsReward(
                clip_model=options.clip_model, checkpoint=options.checkpoint, device=device
            )
        case VlmJudgeConfig():
            return _build_judge(options)
        case RemoteConfig():
            from rewards.remote.term import RemoteReward

            return RemoteReward(
                options.url,
                needs=options.needs(),
                retries=options.retries,
                timeout_seconds=options.timeout_seconds,
                token=_read_token(options.token_variable),
            )
        case _:
            raise TypeError(f"{type(options).__name__} is the base of the kinds, not one of them")


def _read_token(variable: str | None) -> str:
    # A scorer of someone else's may want none, and one that does says so.
    if variable is None or not os.environ.get(variable):
        return ""
    from rewards.remote.client import read_key

    remedy = "set the term's token_variable=null where none is wanted"
    return read_key(variable, option="token_variable", remedy=remedy)


def _build_judge(options: VlmJudgeConfig) -> Reward:
    from rewards.terms.vlm_judge import Endpoint, VlmJudgeReward
    from rewards.terms.vlm_question import Question

    endpoint = Endpoint(
        url=options.url,
        model=options.model,
        api_key_variable=options.api_key_variable,
        request_timeout_seconds=options.request_timeout_seconds,
        retries=options.retries,
        requests_at_once=options.requests_at_once,
    )
    question = Question(options.question, lowest=options.lowest, highest=options.highest)
    return VlmJudgeReward(endpoint, question)


def _build_reader(config: EasyOcrConfig | RapidOcrConfig, device: torch.device) -> TextReader:
    if isinstance(config, EasyOcrConfig):
        from rewards.terms.ocr_easyocr import EasyOcrReader

        return EasyOcrReader(config.languages, device=device)
    from rewards.terms.ocr_rapidocr import RapidOcrReader

    return RapidOcrReader(threads=config.threads, detection_side=config.detection_side)
