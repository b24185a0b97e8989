from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rewards.base import TermConfig
from rewards.terms import KINDS
from rewards.terms.ocr import OCR_ENGINES
from rewards.types import RewardError
from tests.factories import REQUIRED_OPTIONS

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
    term = read(name, REQUIRED_OPTIONS[name])
    assert type(term).model_validate(term.model_dump(mode="json")) == term


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lpips", {"network": "resnet"}),
        ("lpips", {"zebra": 1}),
        ("ssim", {"weight": "0.5"}),
        ("ssim", {"std_floor": 0.0}),
        ("ssim", {"timeout_seconds": 0}),
        ("rapidocr", {"threads": 0}),
        ("rapidocr", {"detection_side": 100}),
        ("rapidocr", {"extra_text_penalty": 1.5}),
        ("easyocr", {"languages": []}),
        ("aesthetic", {"head": ""}),
        ("custom", {"function": "no_module"}),
        ("custom", {"function": "x:"}),
        ("remote", {"url": "scores.example:8700"}),
        ("composition", {"threshold": 0.0}),
        ("composition", {"counting_threshold": 1.0}),
        ("composition", {"position_margin": -0.1}),
        ("composition", {"max_objects": 0}),
        ("composition", {"score": "sparse"}),
        ("vlm_judge", {"url": "file:///x"}),
        ("vlm_judge", {"retries": -1}),
        ("vlm_judge", {"lowest": 10}),
        ("vlm_judge", {"question": "{promt}"}),
        ("vlm_judge", {"question": "{question}"}),
        ("vlm_judge", {"pattern": "Score: ("}),
        ("vlm_judge", {"pattern": "Score: [0-9]"}),
        ("vlm_judge", {"read": "expected_number"}),  # 10 may be two tokens
    ],
)
def test_terms_refuse_bad_values_and_name_the_key(name: str, options: dict[str, Any]) -> None:
    (key,) = options
    assert refused_key(name, {**REQUIRED_OPTIONS[name], **options}) == (key,)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("remote", {"url": "http://me:pass-word@scores.example"}),
        ("remote", {"token_variable": "pass-word"}),
        ("vlm_judge", {"url": "http://judge.example/v1?key=pass-word"}),
        ("vlm_judge", {"url": "http://judge.example/v1#pass-word"}),
        ("vlm_judge", {"api_key_variable": "pass-word"}),
    ],
)
def test_a_key_where_an_address_or_a_name_belongs_is_refused_and_not_repeated(
    name: str, options: dict[str, Any]
) -> None:
    (key,) = options
    with pytest.raises(ValidationError) as caught:
        read(name, {**REQUIRED_OPTIONS[name], **options})
    (details,) = caught.value.errors()
    assert (details["loc"], details["input"]) == ((key,), "[hidden]")
    assert "pass-word" not in str(caught.value)


def test_terms_of_older_runs_are_read() -> None:
    assert read("ssim", {"run_in": "thread"}) == read("ssim", {})
    assert refused_key("ssim", {"run_in": "process"}) == ("run_in",)


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
        ("composition", ("objects",)),
        ("vlm_judge", ("prompt",)),
        ("remote", ("prompt",)),
        ("custom", ("prompt",)),
        ("aesthetic", ()),
    ],
)
def test_terms_say_what_of_a_prompt_they_look_at(name: str, needs: tuple[str, ...]) -> None:
    assert read(name, REQUIRED_OPTIONS[name]).needs() == needs


@pytest.mark.parametrize("name", ["custom", "remote"])
def test_needs_of_a_users_own_term_are_what_the_user_states(name: str) -> None:
    def stated(*needs: str) -> dict[str, Any]:
        return {**REQUIRED_OPTIONS[name], "needs_of_prompt": list(needs)}

    assert read(name, stated("text", "target")).needs() == ("text", "target")
    assert read(name, stated()).needs() == ()
    assert refused_key(name, stated("prompt", "image")) == ("needs_of_prompt", 1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("aesthetic", {"clip_weights": "no.pt"}, r"^aesthetic\.clip_weights no\.pt"),
        ("aesthetic", {"head": "no.pth"}, r"^aesthetic\.head no\.pth"),
        ("hps", {"checkpoint": "no.pt"}, r"^hps\.checkpoint no\.pt"),
        ("hps", {"checkpoint": __file__, "clip_model": "no.json"}, r"^hps\.clip_model no\.json"),
        (
            "pick_score",
            {"model": "a/b/c"},
            r"^pick_score\.model 'a/b/c' ",
        ),
        ("pick_score", {"processor": "/no/p"}, r"^pick_score\.processor '/no/p' "),
        ("custom", {"function": "no_module:f"}, "no_module cannot be imported"),
    ],
)
def test_terms_miss_what_they_name_before_a_model_is_loaded(
    name: str, options: dict[str, Any], message: str
) -> None:
    term = read(name, {**REQUIRED_OPTIONS[name], **options})
    with pytest.raises(RewardError, match=message):
        term.check()
