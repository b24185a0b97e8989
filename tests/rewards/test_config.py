from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rewards.config import RewardConfig
from rewards.terms import KINDS
from rewards.terms.ocr import EasyOcrConfig, RapidOcrConfig

FULL: dict[str, Any] = {
    "combine": "weighted_sum",
    "terms": {
        "lpips": {"weight": 0.4, "network": "squeeze", "pretrained": False},
        "ssim": {"weight": 0.2},
        "ocr": {"weight": 0.3, "engine": "easyocr", "languages": ["en", "de"]},
        "aesthetic": {"weight": 0.1, "clip_model": "ViT-B-32", "head": "head.pth"},
    },
}


def read(terms: dict[str, Any], **others: Any) -> RewardConfig:
    return RewardConfig.model_validate({"terms": terms, **others})


def problem(values: object) -> dict[str, Any]:
    """The one problem pydantic finds in a section."""
    with pytest.raises(ValidationError) as caught:
        RewardConfig.model_validate(values)
    (details,) = caught.value.errors()
    return dict(details)


@pytest.mark.parametrize(
    ("options", "key"), [({"network": "resnet"}, "network"), ({"std_floor": 0.0}, "std_floor")]
)
def test_config_names_the_key_of_a_bad_option(options: dict[str, Any], key: str) -> None:
    details = problem({"terms": {"near": {"kind": "lpips", "weight": 1.0, **options}}})
    assert details["loc"] == ("terms", "near", key)


def problem_of_terms(terms: dict[str, Any], **others: Any) -> tuple[str, str, str]:
    """Where it is, the rule and the remedy."""
    details = problem({"terms": terms, **others})
    place = ".".join(str(part) for part in details["loc"])
    return place, details["ctx"]["rule"], details["ctx"]["remedy"]


def test_config_reads_every_term() -> None:
    config = RewardConfig.model_validate(FULL)
    assert config.weights() == {"lpips": 0.4, "ssim": 0.2, "ocr": 0.3, "aesthetic": 0.1}
    ocr = config.terms["ocr"]
    assert isinstance(ocr, EasyOcrConfig)
    assert ocr.languages == ("en", "de")


def test_config_survives_a_round_trip() -> None:
    watched = {"seen": {"kind": "psnr", "weight": 0.0, "std_floor": 0.5}}
    config = read({**FULL["terms"], **watched}, watch=["seen"], overlap=False)
    again = RewardConfig.model_validate(config.model_dump(mode="json"))
    assert again == config
    assert list(again.terms) == list(config.terms)


def test_config_orders_terms_by_kind_then_name_not_by_file() -> None:
    config = read(
        {
            "text": {"kind": "ocr", "weight": 1, "engine": "rapidocr"},
            "ocr": {"weight": 1, "engine": "rapidocr"},
            "near": {"kind": "lpips", "weight": 2},
            "a_custom": {"kind": "custom", "weight": 1, "function": "a:b"},
        }
    )
    assert list(config.weights()) == ["near", "ocr", "text", "a_custom"]


def test_config_takes_null_for_not_used() -> None:
    assert read({"ssim": {"weight": 1.0}, "lpips": None}).weights() == {"ssim": 1.0}


def test_config_chooses_options_by_engine() -> None:
    ocr = read({"ocr": {"weight": 1.0, "engine": "rapidocr", "threads": 3}}).terms["ocr"]
    assert isinstance(ocr, RapidOcrConfig)
    assert ocr.threads == 3


def test_config_takes_two_terms_of_one_kind_under_names_of_their_own() -> None:
    config = read(
        {
            "near": {"kind": "lpips", "weight": 1.0, "network": "alex"},
            "far": {"kind": "lpips", "weight": 0.5, "network": "vgg"},
        }
    )
    assert config.weights() == {"far": 0.5, "near": 1.0}
    assert [term.model_dump()["network"] for term in config.terms.values()] == ["vgg", "alex"]


def test_config_lets_a_term_bear_the_name_of_another_kind() -> None:
    term = read({"ssim": {"kind": "psnr", "weight": 1.0}}).terms["ssim"]
    assert isinstance(term, KINDS["psnr"])


def test_config_allows_negative_weights() -> None:
    assert read({"ssim": {"weight": -1.0}}).weights() == {"ssim": -1.0}


def test_config_refuses_unknown_terms_and_names_the_nearest() -> None:
    assert problem_of_terms({"lpip": {"weight": 1.0}, "ssim": {"weight": 1.0}}) == (
        "terms.lpip",
        f"'lpip' is not a reward term ({', '.join(KINDS)})",
        "did you mean lpips?",
    )
    place, _, remedy = problem_of_terms({"zebra": {"weight": 1.0}})
    assert (place, remedy) == (
        "terms.zebra",
        "give it a kind: +reward.terms.zebra.kind=custom, or another of these",
    )


@pytest.mark.parametrize("name", ["mine", "ssim"])
@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("lpip", "did you mean lpips?"),
        ("zebra", "set reward.terms.NAME.kind=custom for your own"),
        (None, "set reward.terms.NAME.kind=custom for your own"),
    ],
)
def test_config_refuses_unknown_kinds(name: str, kind: object, remedy: str) -> None:
    assert problem_of_terms({name: {"kind": kind, "weight": 1.0}}) == (
        f"terms.{name}.kind",
        f"must be one of {', '.join(KINDS)}",
        remedy.replace("NAME", name),
    )


@pytest.mark.parametrize("name", ["Mine", "my-term", "1st", "a.b", "", "é", "x" * 41, "raw/x"])
def test_config_refuses_names_that_cannot_stand_in_keys_and_files(name: str) -> None:
    details = problem({"terms": {name: {"kind": "ssim", "weight": 1.0}}})
    assert details["loc"] == ("terms", name)
    assert "small letters, digits and _, at most 40" in details["ctx"]["rule"]


def test_config_takes_names_of_forty_letters_digits_and_underscores() -> None:
    name = "a_1" + "x" * 37
    assert list(read({name: {"kind": "ssim", "weight": 1.0}}).terms) == [name]


@pytest.mark.parametrize("options", [0.4, "0.4", [0.4], True])
def test_config_refuses_terms_that_are_no_section(options: object) -> None:
    assert problem_of_terms({"ssim": options}) == (
        "terms.ssim",
        "must be a section with keys of its own",
        "write ssim: {weight: 1.0}",
    )


@pytest.mark.parametrize("terms", [{}, {"ssim": None}])
def test_config_refuses_no_terms(terms: dict[str, Any]) -> None:
    details = problem({"terms": terms})
    assert details["loc"] == ("terms",)
    assert "no term is used" in details["msg"]


@pytest.mark.parametrize("terms", [None, [], "ssim"])
def test_config_refuses_terms_that_are_no_mapping(terms: object) -> None:
    assert problem({"terms": terms})["loc"] == ("terms",)


def test_config_refuses_weights_that_are_all_zero() -> None:
    details = problem({"terms": {"ssim": {"weight": 0.0}, "lpips": {"weight": 0}}})
    assert details["loc"] == ("terms",)
    assert "(lpips, ssim) are 0" in details["msg"]
    assert "set one of them, say reward.terms.lpips.weight=1" in details["msg"]


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
        ("thread", "did you mean threads?"),
        (
            "zebra",
            "use some of weight, share, at_least, std_floor, timeout_seconds, only, when, run_in, "
            "kind, case_sensitive, extra_text_penalty, engine, threads, detection_side",
        ),
    ],
)
def test_config_refuses_options_that_the_engine_does_not_have(option: str, remedy: str) -> None:
    found = problem_of_terms({"ocr": {"weight": 1.0, "engine": "rapidocr", option: 1}})
    assert found == (f"terms.ocr.{option}", "is not an option of engine rapidocr", remedy)


@pytest.mark.parametrize(
    ("kind", "option", "remedy"),
    [
        ("ssim", "wieght", "did you mean weight?"),
        (
            "ssim",
            "zebra",
            "use some of weight, share, at_least, std_floor, timeout_seconds, only, when, run_in, "
            "against, kind",
        ),
        ("lpips", "netwrk", "did you mean network?"),
    ],
)
def test_config_refuses_options_that_a_kind_does_not_have(
    kind: str, option: str, remedy: str
) -> None:
    found = problem_of_terms({"mine": {"kind": kind, "weight": 1.0, option: 1}})
    assert found == (f"terms.mine.{option}", f"is not an option of kind {kind}", remedy)


AESTHETIC = {"weight": 1.0, "head": "head.pth"}


def test_config_refuses_a_reward_that_looks_at_the_picture_alone() -> None:
    place, rule, remedy = problem_of_terms({"aesthetic": AESTHETIC})
    assert place == "terms"
    assert "(aesthetic use the picture alone)" in rule
    assert remedy == (
        "add a tied term (ocr, clip_score, lpips, ...), or set reward.allow_untied=true"
    )


def test_config_does_not_count_a_tied_term_of_weight_zero() -> None:
    place, rule, _ = problem_of_terms({"aesthetic": AESTHETIC, "ssim": {"weight": 0.0}})
    assert place == "terms"
    assert "(aesthetic use" in rule


def test_config_counts_what_a_users_own_term_needs() -> None:
    mine = {"kind": "custom", "weight": 1.0, "function": "a:b"}
    assert read({"mine": mine}).weights() == {"mine": 1.0}
    place, _, _ = problem_of_terms({"mine": {**mine, "needs_of_prompt": []}})
    assert place == "terms"


def test_config_allows_an_untied_reward_on_request() -> None:
    assert read({"aesthetic": AESTHETIC}, allow_untied=True).weights() == {"aesthetic": 1.0}


@pytest.mark.parametrize("weight", [-0.1, 0.1])
def test_config_is_tied_by_one_term_of_any_weight(weight: float) -> None:
    config = read({"aesthetic": AESTHETIC, "ssim": {"weight": weight}})
    assert config.weights() == {"ssim": weight, "aesthetic": 1.0}


WATCHED = {"ssim": {"weight": 1.0}, "psnr": {"weight": 0.0}, "near": {"kind": "lpips", "weight": 0}}


def test_config_takes_terms_of_weight_zero_to_watch() -> None:
    assert read(WATCHED, watch=["psnr", "near"]).watch == ("psnr", "near")
    assert read(WATCHED).watch == ()


@pytest.mark.parametrize(
    ("watched", "rule", "remedy"),
    [
        (
            "hps",
            "'hps' is not a term of reward.terms",
            "add it there with weight 0, or use ['near', 'psnr']",
        ),
        (
            "ssim",
            "'ssim' has weight 1.0: what is trained on cannot watch",
            "set reward.terms.ssim.weight=0, or watch another term of its kind",
        ),
    ],
)
def test_config_refuses_to_watch_what_is_trained_on_or_not_there(
    watched: str, rule: str, remedy: str
) -> None:
    assert problem_of_terms(WATCHED, watch=["psnr", watched]) == ("watch", rule, remedy)


def test_config_refuses_a_weight_of_a_term_for_evaluations() -> None:
    terms = {"ssim": {"weight": 1.0}, "psnr": {"weight": 0.5, "when": "evaluation"}}
    place, rule, remedy = problem_of_terms(terms)
    assert place == "terms.psnr.weight"
    assert rule.startswith("must be 0 where when is evaluation")
    assert remedy == "set reward.terms.psnr.weight=0, or reward.terms.psnr.when=always"
    terms["psnr"]["weight"] = 0.0
    assert read(terms).terms["psnr"].when == "evaluation"
    place, rule, _ = problem_of_terms(terms, watch=["psnr"])
    assert (place, rule) == (
        "watch",
        "'psnr' is scored in evaluations alone, where it is a canary anyway",
    )


def test_config_refuses_to_watch_where_nothing_has_weight_zero() -> None:
    place, _, remedy = problem_of_terms({"ssim": {"weight": 1.0}}, watch=["hps"])
    assert (place, remedy) == ("watch", "add it there with weight 0")


def test_config_takes_shares_and_weights_where_there_are_none() -> None:
    terms = {"ssim": {"weight": 0.2}, "psnr": {"weight": 0.5, "share": 0.7}}
    reward = read(terms, combine="shares")
    assert reward.weights() == {"ssim": 0.2, "psnr": 0.7}
    steering = reward.steering()
    assert steering is not None
    assert (steering.combine, steering.at_least) == ("shares", {})
    assert read({"ssim": {"weight": 0.2}}).steering() is None
    bounded = read({"ssim": {"weight": 0.2, "at_least": 0.5}}, bound_rate=0.2, bound_max=3.0)
    steering = bounded.steering()
    assert steering is not None
    assert (steering.at_least, steering.bound_rate, steering.bound_max) == ({"ssim": 0.5}, 0.2, 3.0)


@pytest.mark.parametrize(
    ("term", "others", "place", "rule", "remedy"),
    [
        (
            {"weight": 1.0, "share": 0.5},
            {},
            "terms.psnr.share",
            "is read with reward.combine=shares alone",
            "set reward.combine=shares, or use reward.terms.psnr.weight",
        ),
        (
            {"weight": -1.0},
            {"combine": "shares"},
            "terms.psnr.weight",
            "must be 0 or more with reward.combine=shares: it is the share asked for",
            "set it to 1 or 0",
        ),
        (
            {"weight": -1.0, "at_least": 0.5},
            {},
            "terms.psnr.at_least",
            "asks for high scores of a term whose weight -1 asks for low ones",
            "set reward.terms.psnr.weight to 0 or more, or leave the bound out",
        ),
        (
            {"weight": 0.0, "when": "evaluation", "at_least": 0.5},
            {},
            "terms.psnr.at_least",
            "is a bound in training, which does not score this term (when: evaluation)",
            "set reward.terms.psnr.when=always, or leave the bound out",
        ),
        (
            {"weight": 0.0, "at_least": 0.5},
            {"watch": ["psnr"]},
            "watch",
            "'psnr' has at_least 0.5: what is trained on cannot watch",
            "set reward.terms.psnr.at_least=null, or watch another term of its kind",
        ),
        (
            {"weight": 0.0, "share": 0.5},
            {"watch": ["psnr"], "combine": "shares"},
            "watch",
            "'psnr' has share 0.5: what is trained on cannot watch",
            "set reward.terms.psnr.share=0, or watch another term of its kind",
        ),
    ],
)
def test_config_refuses_shares_and_bounds_that_cannot_be(
    term: dict[str, Any], others: dict[str, Any], place: str, rule: str, remedy: str
) -> None:
    terms = {"ssim": {"weight": 1.0}, "psnr": term}
    assert problem_of_terms(terms, **others) == (place, rule, remedy)
