"""Kinds of reward terms, one file each: options, how it is built, its memory, how it scores.

A term's `kind` says which class scores; it is the term's name where that is the name of a kind, and
must be written where the term has a name of its own, so that one kind can be used twice.
"""

from __future__ import annotations

from rewards.base import TermConfig
from rewards.terms.aesthetic import AestheticConfig
from rewards.terms.clip import ClipImageConfig, ClipScoreConfig
from rewards.terms.custom import CustomConfig
from rewards.terms.hps import HpsConfig
from rewards.terms.lpips import LpipsConfig
from rewards.terms.ocr import OcrConfig
from rewards.terms.pick_score import PickScoreConfig
from rewards.terms.psnr import PsnrConfig
from rewards.terms.remote import RemoteConfig
from rewards.terms.ssim import SsimConfig
from rewards.terms.vlm_judge import VlmJudgeConfig

KINDS: dict[str, type[TermConfig]] = {
    "lpips": LpipsConfig,
    "ssim": SsimConfig,
    # Abstract: one of its two forms is constructed.
    "ocr": OcrConfig,  # type: ignore[type-abstract]
    "aesthetic": AestheticConfig,
    "psnr": PsnrConfig,
    "clip_score": ClipScoreConfig,
    "clip_image": ClipImageConfig,
    "pick_score": PickScoreConfig,
    "hps": HpsConfig,
    "vlm_judge": VlmJudgeConfig,
    "remote": RemoteConfig,
    "custom": CustomConfig,
}
"""Config class of each kind. The R axis of tables is in this order, whatever that of the YAML."""
