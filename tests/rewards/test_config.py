from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rewards.config import EasyOcrConfig, RapidOcrConfig, RewardConfig

FULL: dict[str, Any] = {
    "combine": "weighted_sum",
    "terms": {
        "lpips": {"weight": 0.4, "network": "squeeze", "pretrained": False},
        "ssim": {"weight": 0.2},
        "ocr": {"weight": 0.3, "engine": "easyocr", "languages": ["en", "de"]},
        "aesthetic": {"weight": 0.1, "clip_model": "ViT-B-32", "head": "head.pth"},
    },
}


def problem(values: object) -> dict[str, Any]:
    """The one problem pydantic finds in a section."""
    with pytest.raises(ValidationError) as caught:
        RewardConfig.model_validate(values)
    (details,) = caught.value.errors()
    return dict(details)


def test_config_reads_every_term() -> None:
    config = RewardConfig.model_validate(FULL)
    assert config.terms.weights() == {"lpips": 0.4, "ssim": 0.2, "ocr": 0.3, "aesthetic": 0.1}
    assert isinstance(config.terms.ocr, EasyOcrConfig)
    assert config.terms.ocr.languages == ("en", "de")


def test_config_survives_a_round_trip() -> None:
    config = RewardConfig.model_validate(FULL)
    assert RewardConfig.model_validate(config.model_dump(mode="json")) == config


def test_config_orders_terms_by_axis_not_by_file() -> None:
    values = {"terms": {"ocr": {"weight": 1, "engine": "rapidocr"}, "lpips": {"weight": 2}}}
    config = RewardConfig.model_validate(values)
    assert list(config.terms.weights()) == ["lpips", "ocr"]


def test_config_takes_null_for_not_used() -> None:
    values = {"terms": {"ssim": {"weight": 1.0}, "lpips": None}}
    assert RewardConfig.model_validate(values).terms.weights() == {"ssim": 1.0}


def test_config_chooses_options_by_engine() -> None:
    values = {"terms": {"ocr": {"weight": 1.0, "engine": "rapidocr", "threads": 3}}}
    ocr = RewardConfig.model_validate(values).terms.ocr
    assert isinstance(ocr, RapidOcrConfig)
    assert ocr.threads == 3


def test_config_allows_negative_weights() -> None:
    values = {"terms": {"ssim": {"weight": -1.0}}}
    assert RewardConfig.model_validate(values).terms.weights() == {"ssim": -1.0}


def test_config_refuses_unknown_term_and_lists_the_known() -> None:
    details = problem({"terms": {"lpip": {"weight": 1.0}, "ssim": {"weight": 1.0}}})
    assert details["loc"] == ("terms", "lpip")
    assert details["ctx"]["rule"] == "'lpip' is not a reward term"
    assert details["ctx"]["remedy"] == "use some of lpips, ssim, ocr, aesthetic"


@pytest.mark.parametrize("terms", [{}, {"ssim": None}])
def test_config_refuses_no_terms(terms: dict[str, Any]) -> None:
    details = problem({"terms": terms})
    assert details["loc"] == ("terms",)
    assert "no term is used" in details["msg"]


def test_config_refuses_weights_that_are_all_zero() -> None:
    details = problem({"terms": {"ssim": {"weight": 0.0}, "lpips": {"weight": 0}}})
    assert details["loc"] == ("terms",)
    assert "(lpips, ssim) are 0" in details["msg"]


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), "0.5", None])
def test_config_refuses_weights_that_are_no_finite_number(weight: object) -> None:
    assert problem({"terms": {"ssim": {"weight": weight}}})["loc"] == ("terms", "ssim", "weight")


@pytest.mark.parametrize("engine", ["tesseract", None])
def test_config_refuses_unknown_engine_and_lists_the_known(engine: str | None) -> None:
    details = problem({"terms": {"ocr": {"weight": 1.0, "engine": engine}}})
    assert details["loc"] == ("terms", "ocr", "engine")
    assert details["ctx"]["rule"] == "must be one of easyocr, rapidocr"


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("languages", "remove it, or set engine=easyocr"),
        ("thread", "use some of weight, engine, threads, detection_side"),
    ],
)
def test_config_refuses_options_that_the_engine_does_not_have(option: str, remedy: str) -> None:
    details = problem({"terms": {"ocr": {"weight": 1.0, "engine": "rapidocr", option: 1}}})
    assert details["loc"] == ("terms", "ocr", option)
    assert details["ctx"]["rule"] == "is not an option of engine rapidocr"
    assert details["ctx"]["remedy"] == remedy


@pytest.mark.parametrize(
    ("term", "options", "key"),
    [
        ("lpips", {"network": "resnet"}, "network"),
        ("lpips", {"pretrained": "yes"}, "pretrained"),
        ("ssim", {"window": 11}, "window"),
        ("ocr", {"engine": "rapidocr", "threads": 0}, "threads"),
        ("ocr", {"engine": "rapidocr", "detection_side": 100}, "detection_side"),
        ("ocr", {"engine": "easyocr", "languages": []}, "languages"),
        ("aesthetic", {}, "head"),
    ],
)
def test_config_refuses_bad_options_and_names_the_key(
    term: str, options: dict[str, Any], key: str
) -> None:
    assert problem({"terms": {term: {"weight": 1.0, **options}}})["loc"] == ("terms", term, key)
