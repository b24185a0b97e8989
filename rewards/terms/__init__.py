"""Kinds of reward terms, one file each: options, construction, memory and scoring.

Beside them are what CLIP terms share (`clip_loading`), what `ocr` is made of (two engines, the
orders in which a page is read, texts compared with words, and the score of each letter), what
`composition` is made of (rows, rule, dense score, detectors, and the colours of objects), and what
`vlm_judge` is made of: the endpoint, its answers, and questions in the rows of prompts.

A term's `kind` selects the class that scores. It defaults to the term's name if that is the name of
a kind, and must be set for any other name, so that a kind can be used several times.
"""

from __future__ import annotations

from rewards.base import TermConfig
from rewards.terms.aesthetic import AestheticConfig
from rewards.terms.clip import ClipImageConfig, ClipScoreConfig
from rewards.terms.composition import CompositionConfig
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
    "composition": CompositionConfig,
    "vlm_judge": VlmJudgeConfig,
    "remote": RemoteConfig,
    "custom": CustomConfig,
}
"""Config class of each kind. The R axis of tables has this order, whatever that of the YAML."""
