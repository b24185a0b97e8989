from __future__ import annotations

import pytest

from glm_grpo.analysis.term_weights import parse_weights
from glm_grpo.errors import ConfigError


def test_parse_weights_reads_terms_and_numbers() -> None:
    words = ["lpips=0.4", "ocr=-1e-1"]
    assert parse_weights(words, option="--yardstick") == {"lpips": 0.4, "ocr": -0.1}
    assert parse_weights([], option="--share") == {}


@pytest.mark.parametrize("word", ["ocr", "ocr=", "=0.5", "ocr=much", "ocr=nan", "ocr=inf", "a=1"])
def test_parse_weights_refuses_other_words(word: str) -> None:
    rule = rf"--share '{word}': must be the name of a term.*write --share lpips=0.4"
    with pytest.raises(ConfigError, match=rule):
        parse_weights(["a=1", word], option="--share")
