"""Weights of the reward terms, from their configs alone."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

import open_clip
import torch

from glm_grpo.models.planning import ScorerSizes
from rewards.terms.clip_loading import find_architecture
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

_FLOAT32 = 4

_LPIPS_PARAMETERS = {"alex": 2_470_848, "vgg": 14_716_160, "squeeze": 724_736}
"""Of backbone and linear layers, from the package."""

_EASYOCR_PARAMETERS = 24_600_000
"""Of the CRAFT detector and the English recogniser, rounded up from the sizes of their files."""

_PICK_SCORE_PARAMETERS = 986_000_000
"""Of CLIP ViT-H/14, both towers."""


def scorer_sizes(terms: Iterable[TermConfig]) -> ScorerSizes:
    """What the terms hold in memory, in fp32.

    A function of the user's own counts for nothing, since no one can know what it loads.

    Raises:
        RewardError: A term names a CLIP architecture that does not exist.
        TypeError: A kind of term has no size here.
    """
    movable = staying = on_cpu = 0
    for term in terms:
        size = _network_bytes(term)
        if isinstance(term, RapidOcrConfig):
            on_cpu += size
        elif term.run_in == "process":
            staying += size
        else:
            movable += size
    return ScorerSizes(movable=movable, staying=staying, on_cpu=on_cpu)


def _network_bytes(term: TermConfig) -> int:
    match term:
        case LpipsConfig():
            return _LPIPS_PARAMETERS[term.network] * _FLOAT32
        case EasyOcrConfig():
            return _EASYOCR_PARAMETERS * _FLOAT32
        case PickScoreConfig():
            return _PICK_SCORE_PARAMETERS * _FLOAT32
        case AestheticConfig() | ClipImageConfig():
            return _clip_bytes(term.clip_model, is_image_only=True)
        case ClipScoreConfig() | HpsConfig():
            return _clip_bytes(term.clip_model, is_image_only=False)
        case RapidOcrConfig():
            return _rapidocr_bytes()
        case SsimConfig() | PsnrConfig():
            # Windows and differences, without weights.
            return 0
        case VlmJudgeConfig() | RemoteConfig():
            # Their networks are behind an endpoint, in the memory of another process.
            return 0
        case CustomConfig():
            return 0
        case _:
            raise TypeError(
                f"{type(term).__name__}: what a term of this kind holds in memory is not known to "
                "the plan; add it to glm_grpo/plan/scorers.py"
            )


@functools.cache
def _clip_bytes(clip_model: str, *, is_image_only: bool) -> int:
    architecture = find_architecture(clip_model, key="clip_model")
    level = logging.root.level
    # It warns that there are no weights, which is meant.
    logging.root.setLevel(logging.ERROR)
    try:
        with torch.device("meta"):
            clip = open_clip.create_model(architecture, load_weights=False, device="meta")
    finally:
        logging.root.setLevel(level)
    network = clip.visual if is_image_only else clip
    tensors = [*network.parameters(), *network.buffers()]
    return sum(each.numel() * each.element_size() for each in tensors)


def _rapidocr_bytes() -> int:
    """Of the ONNX models in its wheel, which threads share."""
    models = Path(str(files("rapidocr") / "models"))
    return sum(path.stat().st_size for path in models.glob("*.onnx"))
