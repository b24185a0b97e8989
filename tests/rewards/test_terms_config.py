from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rewards.base import TermConfig
from rewards.terms import KINDS
from rewards.terms.ocr import OCR_ENGINES

LEAST: dict[str, dict[str, Any]] = {
    "lpips": {},
    "ssim": {},
    "aesthetic": {"head": "head.pth"},
    "psnr": {},
    "clip_score": {},
    "clip_image": {},
    "pick_score": {},
    "hps": {},
    "vlm_judge": {"url": "http://127.0.0.1:8000/v1", "model": "judge"},
    "remote": {"url": "http://127.0.0.1:8700"},
    "custom": {"function": "mine.scores:brightness"},
    "easyocr": {"engine": "easyocr"},
    "rapidocr": {"engine": "rapidocr"},
}
"""What must be written of each kind, or engine of OCR, beside kind and weight."""

# What is constructed for OCR is one of its engines.
ALL: dict[str, type[TermConfig]] = {
    name: kind for name, kind in {**KINDS, **OCR_ENGINES}.items() if name != "ocr"
}


def read(name: str, options: dict[str, Any]) -> TermConfig:
    kind = "ocr" if name in OCR_ENGINES else name
    return ALL[name].model_validate({"kind": kind, "weight": 0.5, **options})


def refused_key(name: str, options: dict[str, Any]) -> tuple[int | str, ...]:
    """The key of the one problem pydantic finds."""
    with pytest.raises(ValidationError) as caught:
        read(name, options)
    (details,) = caught.value.errors()
    return details["loc"]


@pytest.mark.parametrize("name", ALL)
def test_terms_read_the_least_they_need_and_survive_a_round_trip(name: str) -> None:
    term = read(name, LEAST[name])
    assert type(term).model_validate(term.model_dump(mode="json")) == term


@pytest.mark.parametrize(
    ("name", "missing"), [(name, key) for name, options in LEAST.items() for key in options]
)
def test_terms_refuse_to_be_without_what_they_need(name: str, missing: str) -> None:
    options = {key: value for key, value in LEAST[name].items() if key != missing}
    assert refused_key(name, options) == (missing,)


@pytest.mark.parametrize("name", ALL)
def test_terms_refuse_other_kinds_and_unknown_options(name: str) -> None:
    assert refused_key(name, {**LEAST[name], "kind": "zebra"}) == ("kind",)
    assert refused_key(name, {**LEAST[name], "zebra": 1}) == ("zebra",)


def test_terms_have_usual_limits() -> None:
    term = read("ssim", {})
    assert (term.std_floor, term.timeout_seconds, term.run_in) == (1e-4, 600.0, "thread")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lpips", {"network": "resnet"}),
        ("lpips", {"pretrained": "yes"}),
        ("ssim", {"weight": "0.5"}),
        ("ssim", {"weight": float("nan")}),
        ("ssim", {"std_floor": 0.0}),
        ("ssim", {"std_floor": float("nan")}),
        ("ssim", {"timeout_seconds": 0}),
        ("ssim", {"timeout_seconds": float("inf")}),
        ("ssim", {"run_in": "cloud"}),
        ("rapidocr", {"threads": 0}),
        ("rapidocr", {"detection_side": 100}),
        ("rapidocr", {"extra_text_penalty": 1.5}),
        ("easyocr", {"extra_text_penalty": -0.5}),
        ("easyocr", {"case_sensitive": 1}),
        ("easyocr", {"languages": []}),
        ("aesthetic", {"head": ""}),
        ("custom", {"function": "no_module"}),
        ("custom", {"function": "../x:y"}),
        ("custom", {"function": "x:"}),
        ("remote", {"url": "ftp://scores.example"}),
        ("remote", {"url": "scores.example:8700"}),
        ("remote", {"url": "http://me@scores.example"}),
        ("remote", {"token_variable": "the-token-itself"}),
        ("remote", {"run_in": "process"}),
        ("vlm_judge", {"url": "file:///x"}),
        ("vlm_judge", {"url": "http://judge.example/v1?key=abc"}),
        ("vlm_judge", {"api_key_variable": ""}),
        ("vlm_judge", {"api_key_variable": "the-key-itself"}),
        ("vlm_judge", {"retries": -1}),
        ("vlm_judge", {"requests_at_once": 0}),
        ("vlm_judge", {"lowest": 10}),
    ],
)
def test_terms_refuse_bad_values_and_name_the_key(name: str, options: dict[str, Any]) -> None:
    (key,) = options
    assert refused_key(name, {**LEAST[name], **options}) == (key,)


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("lpips", ("target",)),
        ("ssim", ("target",)),
        ("psnr", ("target",)),
        ("clip_image", ("target",)),
        ("rapidocr", ("text",)),
        ("easyocr", ("text",)),
        ("clip_score", ("prompt",)),
        ("pick_score", ("prompt",)),
        ("hps", ("prompt",)),
        ("vlm_judge", ("prompt",)),
        ("remote", ("prompt",)),
        ("custom", ("prompt",)),
        ("aesthetic", ()),
    ],
)
def test_terms_say_what_of_a_prompt_they_look_at(name: str, needs: tuple[str, ...]) -> None:
    assert read(name, LEAST[name]).needs() == needs


@pytest.mark.parametrize("name", ["custom", "remote"])
def test_needs_of_a_users_own_term_are_what_the_user_states(name: str) -> None:
    def stated(*needs: str) -> dict[str, Any]:
        return {**LEAST[name], "needs_of_prompt": list(needs)}

    assert read(name, stated("text", "target")).needs() == ("text", "target")
    assert read(name, stated()).needs() == ()
    assert refused_key(name, stated("prompt", "picture")) == ("needs_of_prompt", 1)
