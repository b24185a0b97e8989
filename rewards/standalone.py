"""Score your own images by the terms of a reward."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas
import torch
from jaxtyping import UInt8
from PIL import Image
from pydantic import ValidationError
from torch import Tensor

from rewards.base import TermConfig
from rewards.build import build_scorer
from rewards.config import RewardConfig, with_functions
from rewards.images import (
    ImageError,
    describe_misfit,
    fit_pixels,
    open_rgb,
    to_pixels,
)
from rewards.problems import describe_problems, find_problems
from rewards.refusals import find_refusals
from rewards.terms.custom import ScoringFunction
from rewards.texts import find_quoted_texts
from rewards.types import Prompt
from rewards.weighting import combine

ImageOrPath = Image.Image | Path | str
"""An image in memory, or the path of its file."""

_IN_WORDS = {"objects": "objects, Prompt(..., metadata={'include': ...}),"}
"""Needs of terms that do not explain themselves."""


def score_images(
    prompts: Sequence[str | Prompt],
    images: Sequence[ImageOrPath],
    config: RewardConfig | Mapping[str, object] | None = None,
    *,
    rewards: Mapping[str, ScoringFunction | None] | None = None,
    targets: Sequence[ImageOrPath | None] | None = None,
    device: str = "cpu",
) -> pandas.DataFrame:
    """Score images by every term of a reward.

    Examples:
        >>> from PIL import Image
        >>> from rewards import score_images
        >>> config = {"terms": {"ocr": {"weight": 0.6, "engine": "rapidocr"},
        ...                     "ssim": {"weight": 0.4}}}
        >>> white = Image.new("RGB", (128, 128), "white")
        >>> score_images(['a sign that says "OPEN"'], [white], config, targets=[white])
           ssim  ocr  total
        0   1.0  0.0    0.4

    Args:
        prompts: One per image. For a string, whatever it quotes should be readable in the image; a
            `rewards.Prompt` can specify more.
        images: Images of any size.
        config: `load_config(...).reward`, or a mapping such as the `reward` section of a YAML file;
            not needed beside `rewards`.
        rewards: Scoring functions of your own by the name of their term, of weight 1 unless
            `config` has a term of that name; see `rewards.terms.custom.ScoringFunction`. None
            leaves a term of `config` out.
        targets: Target of each image, or None; scaled to cover the image's size and cropped, as a
            run does for the rollout's size.

    Returns:
        A row per image: the score of each term, higher is better, missing if the term does not
        apply or refused the image; and `total`, their weighted sum, missing if a term with a weight
        refused it. A `combine` that compares the images of a group has
        no meaning for single images, and is not used. Warns about terms that apply to none of the
        images or refused some, and about targets of which less than half is left, or that are
        enlarged more than twice.

    Raises:
        RewardError: `rewards` does not contain functions, or a term cannot be built or cannot score
            an image.
        ValueError: The numbers of prompts, images and targets differ, or the config is refused; the
            message lists every refused key with the rule and the remedy.
        ImageError: An image cannot be used, for example because its file is damaged; a
            `ValueError`.
        FileNotFoundError: A file does not exist.
    """
    if targets is None:
        targets = [None] * len(images)
    if isinstance(prompts, str) or not len(prompts) == len(images) == len(targets):
        raise ValueError(
            f"{len(prompts)} prompts, {len(images)} images, {len(targets)} targets: give lists of "
            "the same length; pass None for a missing target"
        )
    if rewards:
        values = config.model_dump() if isinstance(config, RewardConfig) else config
        config = with_functions(values or {}, rewards)
    try:
        config = RewardConfig.model_validate(config or {})
    except ValidationError as error:
        raise ValueError(describe_problems(find_problems(error, RewardConfig))) from None
    for image in [*images, *targets]:
        if isinstance(image, (str, Path)):
            Path(os.path.expanduser(image)).stat()  # before weights are loaded
    scorer = build_scorer(config, torch.device(device))
    rows, refused = [], set()
    for number, (prompt, image, target) in enumerate(zip(prompts, images, targets, strict=True)):
        opened = _open(image)
        prompt = _as_prompt(prompt, number)
        if target is not None:
            prompt = dataclasses.replace(prompt, target=_fit_target(target, opened, number))
        table = scorer.score([prompt], to_pixels(opened)[None, None])
        scores = table.raw.masked_fill(~table.is_applicable.unsqueeze(1), torch.nan)[0, 0].tolist()
        has_total = bool((table.is_applicable & (table.weights != 0)).any())
        total = combine(table, mode="weighted_sum").item() if has_total else torch.nan
        rows.append([*scores, total])
        for each in find_refusals([prompt], table):
            if each.count > 0:
                refused.add(each.term)
                line = f"{each.term} refused images[{number}]: {each.first}"
                warnings.warn(line, stacklevel=2)
    found = pandas.DataFrame(rows, columns=[*scorer.names, "total"])
    for name, term in config.terms.items():
        if rows and name not in refused and found[name].isna().all():
            _warn_that_unused(name, term)
    return found


def _as_prompt(given: str | Prompt, number: int) -> Prompt:
    if isinstance(given, Prompt):
        return given
    return Prompt(str(number), given, texts=find_quoted_texts(given))


def _fit_target(target: ImageOrPath, image: Image.Image, number: int) -> UInt8[Tensor, "3 H W"]:
    opened, (width, height) = _open(target), image.size
    if misfit := describe_misfit(opened.size, height=height, width=width):
        # At the caller of `score_images`.
        warnings.warn(f"targets[{number}] hardly fits its image ({misfit})", stacklevel=3)
    return fit_pixels(opened, height=height, width=width)


def _warn_that_unused(name: str, term: TermConfig) -> None:
    needs = " and ".join(_IN_WORDS.get(need, need) for need in term.needs()) or "nothing"
    warnings.warn(
        f"{name} applies to none of the images: it needs {needs} in addition to the image, "
        f"and a prompt_id that matches {term.prompt_ids!r}",
        stacklevel=3,
    )


def _open(image: ImageOrPath) -> Image.Image:
    try:
        if isinstance(image, (str, Path)):
            image = Path(os.path.expanduser(image))
        return open_rgb(image)
    except ImageError as error:
        raise ImageError(f"{image} {error}") from error
