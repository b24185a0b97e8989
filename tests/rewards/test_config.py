from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from rewards.config import RewardConfig
from rewards.terms.ocr import EasyOcrConfig

FULL: dict[str, Any] = {
    "lpips": {"weight": 0.4, "network": "squeeze", "pretrained": False},
    "ssim": {"weight": 0.2},
    "ocr": {"weight": 0.3, "engine": "easyocr", "languages": ["en", "de"]},
    "aesthetic": {"weight": 0.1, "clip_model": "ViT-B-32", "head": "head.pth"},
}
AESTHETIC = {"weight": 1.0, "head": "head.pth"}
CUSTOM = {"kind": "custom", "weight": 1.0, "function": "a:b"}


def read(terms: dict[str, Any], **others: Any) -> RewardConfig:
    return RewardConfig.model_validate({"terms": terms, **others})


def problem_of(terms: object, **others: Any) -> dict[str, Any]:
    """The one problem pydantic finds in a section."""
    with pytest.raises(ValidationError) as caught:
        RewardConfig.model_validate({"terms": terms, **others})
    (details,) = caught.value.errors()
    return dict(details)


def test_config_reads_every_term() -> None:
    config = read(FULL)
    assert config.weights() == {"lpips": 0.4, "ssim": 0.2, "ocr": 0.3, "aesthetic": 0.1}
    ocr = config.terms["ocr"]
    assert isinstance(ocr, EasyOcrConfig)
    assert ocr.languages == ("en", "de")


def test_config_survives_a_round_trip() -> None:
    watched = {"seen": {"kind": "psnr", "weight": 0.0, "std_floor": 0.5}}
    config = read({**FULL, **watched}, watch=["seen"], overlap=False)
    again = RewardConfig.model_validate(config.model_dump(mode="json"))
    assert again == config
    assert list(again.terms) == list(config.terms)


def test_config_orders_terms_by_kind_then_name_not_by_file() -> None:
    config = read(
        {
            "text": {"kind": "ocr", "weight": 1, "engine": "rapidocr"},
            "ocr": {"weight": 1, "engine": "rapidocr"},
            "near": {"kind": "lpips", "weight": 2},
            "a_custom": CUSTOM,
        }
    )
    assert list(config.weights()) == ["near", "ocr", "text", "a_custom"]


def test_config_takes_null_for_not_used_and_negative_weights() -> None:
    assert read({"ssim": {"weight": -1.0}, "lpips": None}).weights() == {"ssim": -1.0}


def test_config_takes_two_terms_of_one_kind_under_names_of_their_own() -> None:
    # One of them that of another kind.
    config = read(
        {
            "ssim": {"kind": "lpips", "weight": 1.0, "network": "alex"},
            "far": {"kind": "lpips", "weight": 0.5, "network": "vgg"},
        }
    )
    assert [term.model_dump()["network"] for term in config.terms.values()] == ["vgg", "alex"]


@pytest.mark.parametrize(
    ("name", "options", "place", "rule", "remedy"),
    [
        ("lpip", {}, "lpip", "'lpip' is not a reward term", "did you mean lpips?"),
        ("zebra", {}, "zebra", "not a reward term", "+reward.terms.zebra.kind=custom"),
        ("a", {"kind": "lpip"}, "a.kind", "must be one of lpips", "did you mean lpips?"),
        ("a", {"kind": None}, "a.kind", "must be one of", "set reward.terms.a.kind=custom"),
        ("my-term", {"kind": "ssim"}, "my-term", "lowercase letters, digits and _", "rename it"),
        ("x" * 41, {"kind": "ssim"}, "x" * 41, "at most 40", "rename it"),
        *(
            (name, {"kind": "ssim"}, name, "name of another metric", f"{name}_term")
            for name in ("ocr_exact", "composition_exact")
        ),
        ("ocr", {"engine": "tesseract"}, "ocr.engine", "one of easyocr, rapidocr", "=rapidocr"),
        ("ocr", {}, "ocr.engine", "one of easyocr, rapidocr", "set engine=rapidocr"),
        (
            "ocr",
            {"engine": "rapidocr", "languages": ["en"]},
            "ocr.languages",
            "engine rapidocr",
            "engine=easyocr",
        ),
        (
            "a",
            {"kind": "lpips", "netwrk": 1},
            "a.netwrk",
            "not an option of kind lpips",
            "network?",
        ),
        (
            "a",
            {"kind": "ssim", "zebra": 1},
            "a.zebra",
            "kind ssim",
            "weight, std_floor",
        ),
    ],
)
def test_config_refuses_names_kinds_and_options_that_there_are_not(
    name: str, options: dict[str, Any], place: str, rule: str, remedy: str
) -> None:
    details = problem_of({name: {"weight": 1.0, **options}})
    assert details["loc"] == ("terms", *place.split("."))
    assert rule in details["ctx"]["rule"]
    assert remedy in details["ctx"]["remedy"]


EVALUATED = {"weight": 0.0, "when": "evaluation"}


@pytest.mark.parametrize(
    ("terms", "others", "place", "message"),
    [
        (None, {}, "terms", "valid dictionary"),
        ({"ssim": None}, {}, "terms", "no term is used"),
        (
            {"ssim": {"weight": 0.0}, "lpips": {"weight": 0}},
            {},
            "terms",
            r"\(lpips, ssim\) are 0.* set one of them, for example reward.terms.lpips.weight=1",
        ),
        # One image that pleases would answer every prompt.
        ({"aesthetic": AESTHETIC}, {}, "terms", r"only the image \(aesthetic\)"),
        (
            {"aesthetic": AESTHETIC, "ssim": {"weight": 0.0}},
            {},
            "terms",
            r"\(aesthetic\).*; add such a term .* reward.allow_image_only=true",
        ),
        ({"mine": {**CUSTOM, "needs_of_prompt": []}}, {}, "terms", "only the image"),
        ({"psnr": {"weight": 0.0}}, {"watch": ["hps"]}, "watch", "'hps' is no term of weight 0"),
        ({}, {"watch": ["ssim"]}, "watch", "'ssim' is no term of weight 0 .*set reward.terms.ssim"),
        ({"psnr": EVALUATED}, {"watch": ["psnr"]}, "watch", "'psnr' is no term"),
        (
            {"psnr": {**EVALUATED, "weight": 0.5}},
            {},
            "terms.psnr.weight",
            "must be 0 when `when` is evaluation.*set reward.terms.psnr.weight=0, or",
        ),
    ],
)
def test_config_refuses_rewards_that_cannot_be(
    terms: dict[str, Any] | None, others: dict[str, Any], place: str, message: str
) -> None:
    # Where the terms are at fault, they stand alone.
    if terms is not None and place != "terms":
        terms = {"ssim": {"weight": 1.0}, **terms}
    details = problem_of(terms, **others)
    assert details["loc"] == tuple(place.split("."))
    assert re.search(message, details["msg"])


@pytest.mark.parametrize("weight", [-0.1, 0.1])
def test_config_is_tied_by_one_term_of_any_weight(weight: float) -> None:
    config = read({"aesthetic": AESTHETIC, "ssim": {"weight": weight}})
    assert config.weights() == {"ssim": weight, "aesthetic": 1.0}


def test_config_allows_an_untied_reward_on_request() -> None:
    assert read({"aesthetic": AESTHETIC}, allow_image_only=True).weights() == {"aesthetic": 1.0}
