"""Score your own images by the terms of a reward."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import get_args

import pandas
import torch
from PIL import Image
from pydantic import ValidationError

from rewards.base import Need, TermConfig, has_needs
from rewards.build import build_scorer
from rewards.config import RewardConfig, with_functions
from rewards.pictures import (
    PictureError,
    describe_misfit,
    fit_pixels,
    open_rgb,
    to_pixels,
    to_rgb,
)
from rewards.problems import describe_problems, find_problems
from rewards.reweigh import combine
from rewards.terms.custom import ScoringFunction
from rewards.texts import find_escaped_mark, find_quoted_texts
from rewards.types import Prompt

Picture = Image.Image | Path | str
"""An image in memory, or the path of its file."""

_MOST_NAMED = 3
"""Targets that a warning names."""

_ABSENT: dict[Need, str] = {
    "text": "asks for a text; put it in quotation marks, or pass "
    "rewards.Prompt('0', 'a sign', texts=('OPEN',))",
    "target": "has a target image; pass targets=[...]",
    "source": "has an image to edit; pass rewards.Prompt(..., sources=...)",
}
"""What no prompt has if a term with this need applies to none, and the remedy."""


def score_images(
    prompts: Sequence[str | Prompt],
    images: Sequence[Picture],
    config: RewardConfig | Mapping[str, object] | None = None,
    *,
    rewards: Mapping[str, ScoringFunction | None] | None = None,
    targets: Sequence[Picture | None] | None = None,
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
        device: Device for the networks of the terms.

    Returns:
        A row per image: the score of each term, higher is better, missing if the term does not
        apply; and `total`, their weighted sum. A `combine` that compares the images of a group has
        no meaning for single images, and is not used. Warns about terms that apply to none of the
        images, and about targets of which less than half is left, or that are enlarged more than
        twice.

    Raises:
        RewardError: `rewards` does not contain functions, or a term cannot be built or cannot score
            an image.
        ValueError: The numbers of prompts, images and targets differ, or the config is refused; the
            message lists every refused key with the rule and the remedy.
        PictureError: An image cannot be used, for example because its file is damaged; a
            `ValueError`.
        FileNotFoundError: A file does not exist.
    """
    _refuse_other_forms(prompts, images, targets)
    if targets is None:
        targets = [None] * len(images)
    if not len(prompts) == len(images) == len(targets):
        raise ValueError(
            f"{len(prompts)} prompts, {len(images)} images, {len(targets)} targets: the lists must "
            "have the same length; pass None for a missing target"
        )
    if rewards:
        values = config.model_dump() if isinstance(config, RewardConfig) else config
        config = with_functions(values or {}, rewards)
    if not isinstance(config, RewardConfig):
        config = _read_config(config)
    _refuse_absent("images", images)
    _refuse_absent("targets", targets)
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device = {device!r}: write cpu, cuda or cuda:0") from None
    scorer = build_scorer(config, place)
    rows, parts, misfits = [], [], []
    triples = zip(prompts, images, targets, strict=True)
    for number, (prompt, image, target) in enumerate(triples):
        picture = _open(image)
        described, misfit = _describe(prompt, target, picture.size, number)
        misfits += [f"targets[{number}] ({misfit})"] if misfit else []
        parts.append(_parts_of(described))
        table = scorer.score([described], to_pixels(picture)[None, None])
        scores = table.raw.masked_fill(~table.is_applicable.unsqueeze(1), torch.nan)[0, 0].tolist()
        has_total = bool((table.is_applicable & (table.weights != 0)).any())
        total = combine(table, mode="weighted_sum").item() if has_total else torch.nan
        rows.append([*scores, total])
    found = pandas.DataFrame(rows, columns=[*scorer.names, "total"])
    if rows:
        _warn_of_idle_terms(config, found, parts)
        _warn_of_misfits(misfits)
    return found


def _refuse_other_forms(
    prompts: Sequence[object], images: Sequence[object], targets: Sequence[object] | None
) -> None:
    """Refuse single values instead of lists, and prompts that cannot be meant.

    Raises:
        ValueError: There is one.
    """
    for given in (prompts, images, targets):
        if isinstance(given, (str, Path, Prompt, Image.Image)):
            raise ValueError(
                f"{given!r:.100} is not a list; give one of each for every image: "
                "score_images([prompt], [image], config)"
            )
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, (str, Prompt)):
            raise ValueError(
                f"prompts[{number}] is a {type(prompt).__name__}; give a string, or "
                "rewards.Prompt('0', 'a sign', texts=('OPEN',))"
            )
        if isinstance(prompt, str) and (found := find_escaped_mark(prompt)):
            raise ValueError(
                f"prompts[{number}] contains {found:.100}; remove the backslashes, which would "
                "become part of the text"
            )


_Parts = tuple[str, frozenset[Need]]
"""Id of a prompt, and what it has."""


def _parts_of(prompt: Prompt) -> _Parts:
    return prompt.prompt_id, frozenset(need for need in get_args(Need) if has_needs(prompt, [need]))


def _warn_of_idle_terms(
    config: RewardConfig, found: pandas.DataFrame, parts: Sequence[_Parts]
) -> None:
    reasons = [
        f"{name} ({_why_idle(term, parts)})"
        for name, term in config.terms.items()
        if found[name].isna().all()
    ]
    if reasons:
        said = f"terms that apply to none of the images: {', '.join(reasons)}"
        # At the caller of `score_images`.
        warnings.warn(said, stacklevel=3)


def _why_idle(term: TermConfig, parts: Sequence[_Parts]) -> str:
    matched = [has for prompt_id, has in parts if fnmatchcase(prompt_id, term.only)]
    if not matched:
        return f"its only={term.only!r} matches no prompt_id; that of a string is its position"
    who = "no prompt" if term.only == "*" else f"no prompt that its only={term.only!r} matches"
    absent = [need for need in term.needs() if not any(need in has for has in matched)]
    if not absent:
        return f"{who} has {' and '.join(term.needs())} at once"
    return f"{who} {'; none '.join(_ABSENT[need] for need in absent)}"


def _warn_of_misfits(misfits: Sequence[str]) -> None:
    if misfits:
        others = ["..."] if len(misfits) > _MOST_NAMED else []
        named = ", ".join([*misfits[:_MOST_NAMED], *others])
        fit = "1 target hardly fits" if len(misfits) == 1 else f"{len(misfits)} targets hardly fit"
        warnings.warn(f"{fit} the image: {named}", stacklevel=3)


def _read_config(config: object) -> RewardConfig:
    if hasattr(config, "reward"):
        raise ValueError("config is that of a run; give its reward: config.reward")
    if not isinstance(config, Mapping) or "terms" not in config:
        raise ValueError(
            f"config = {config!r:.200} is not a reward; give load_config(...).reward, or "
            '{"terms": {"ocr": {"weight": 1.0, "engine": "rapidocr"}}}'
        )
    try:
        return RewardConfig.model_validate(config)
    except ValidationError as error:
        problems = find_problems(error, RewardConfig)
        raise ValueError(describe_problems(problems)) from None


def _refuse_absent(name: str, pictures: Sequence[object]) -> None:
    """Refuse anything that is not an image, before weights are loaded.

    Raises:
        ValueError: It is neither in memory nor a path.
        FileNotFoundError: There is no such file.
    """
    for number, picture in enumerate(pictures):
        if isinstance(picture, Image.Image) or (picture is None and name == "targets"):
            continue
        place = f"{name}[{number}]"
        if not isinstance(picture, (str, Path)):
            raise ValueError(
                f"{place} is a {type(picture).__name__}; give a PIL image, such as "
                "Image.fromarray(array), or the path of a file"
            )
        if not Path(picture).is_file():
            raise FileNotFoundError(
                f"{place} = {str(picture)!r}: there is no such file; give an absolute path, or "
                f"one relative to {Path.cwd()}"
            )


def _describe(
    prompt: str | Prompt, target: Picture | None, size: tuple[int, int], number: int
) -> tuple[Prompt, str]:
    """The prompt with its target, and what `describe_misfit` says of it."""
    if isinstance(prompt, str):
        prompt = Prompt(prompt_id=str(number), prompt=prompt, texts=find_quoted_texts(prompt))
    if target is None:
        return prompt, ""
    opened, (width, height) = _open(target), size
    fitted = fit_pixels(opened, height=height, width=width)
    misfit = describe_misfit(opened.size, height=height, width=width)
    return dataclasses.replace(prompt, target=fitted), misfit


def _open(picture: Picture) -> Image.Image:
    if isinstance(picture, Image.Image):
        return to_rgb(picture)
    try:
        return open_rgb(Path(picture))
    except PictureError as error:
        raise PictureError(f"{picture} {error}") from error
