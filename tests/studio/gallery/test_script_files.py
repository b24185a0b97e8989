from __future__ import annotations

import json
import math

import pytest

from glm_grpo.studio.gallery.write import to_script


def value_in(script: bytes) -> object:
    text = script.decode()
    assert text.startswith('glmGallery.receive("run", {')
    assert text.endswith("});\n")
    return json.loads(text[len('glmGallery.receive("run", ') : -3])


@pytest.mark.parametrize(
    "text",
    [
        "</script><script>alert(1)</script>",
        "a\u2028b\u2029c",
        "\"'`${x}\\\r\n\t\0",
    ],
)
def test_to_script_gives_any_text_back(text: str) -> None:
    assert value_in(to_script("run", {"text": text, text: 1})) == {"text": text, text: 1}


def test_to_script_leaves_nothing_that_ends_a_script_or_its_line() -> None:
    script = to_script("run", {"text": "</script><!--\u2028\u2029"}).decode()
    assert not set(script) & {"<", "\u2028", "\u2029"}
    assert script.count("\n") == 1


def test_to_script_replaces_halves_of_surrogate_pairs() -> None:
    assert value_in(to_script("run", {"a\ud83d": "\ude42b"})) == {"a\ufffd": "\ufffdb"}


@pytest.mark.parametrize("number", [0.1, 3.4028235e38, -0.0])
def test_to_script_gives_numbers_back(number: float) -> None:
    read = value_in(to_script("run", {"x": number}))
    assert math.copysign(1, read["x"]) == math.copysign(1, number)  # type: ignore[index]
    assert read == {"x": number}


def test_to_script_refuses_what_is_not_finite() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_script("run", {"x": math.nan})
