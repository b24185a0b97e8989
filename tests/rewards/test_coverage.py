from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import pytest
from torch import Tensor, nn

from rewards.coverage import check_prompts, describe_rare_terms
from rewards.score import Term
from rewards.types import Prompt, RewardError

WITH_TEXT = Prompt("sign", 'a sign saying "A"', texts=("A",))
WITHOUT_TEXT = Prompt("dog", "a dog")


@dataclass
class Applying:
    """Applies to all prompts, or to those with a text; scores nothing."""

    needs_text: bool = False

    def applies_to(self, prompt: Prompt) -> bool:
        return bool(prompt.texts) or not self.needs_text

    def score(self, prompts: Sequence[Prompt], pixels: Tensor) -> NoReturn:
        raise AssertionError

    def modules(self) -> tuple[nn.Module, ...]:
        return ()


def test_check_prompts_names_the_prompt_that_no_term_applies_to() -> None:
    terms = [Term("picky", Applying(needs_text=True), 1.0)]
    with pytest.raises(RewardError, match=r"prompt dog \('a dog'\).*\(picky\)"):
        check_prompts(terms, [WITH_TEXT, WITHOUT_TEXT])


def test_check_prompts_names_terms_that_apply_to_few_and_takes_each_prompt_once() -> None:
    terms = [Term("picky", Applying(needs_text=True), -0.6), Term("any", Applying(), 0.2)]
    prompts = iter([WITH_TEXT, WITHOUT_TEXT, WITHOUT_TEXT])
    assert check_prompts(terms, prompts, set_name="held-out prompts") == [
        "picky (75% of the weight) applies to 1 of the 3 held-out prompts; not to dog ('a dog'), "
        "dog ('a dog')"
    ]


def test_check_prompts_names_the_first_prompts_whose_quotation_marks_ask_for_nothing() -> None:
    terms = [Term("any", Applying(), 1.0)]
    idle_ones = [
        Prompt("0", 'a sign "RAIN'),
        Prompt("1", 'a sign "A" above "RAIN', texts=("A",)),
        Prompt("2", f"{'long ' * 30}\u201cRAIN"),
        Prompt("3", 'another "RAIN'),
    ]
    # In pairs, or with a text of its own, whatever the prompt looks like.
    others = [Prompt("4", 'a sign "A"', texts=("A",)), Prompt("5", 'a 12" sign', texts=("A",))]
    (line,) = check_prompts(terms, [*idle_ones, *others], set_name="training prompts")
    assert line.startswith(
        "unpaired or empty quotation marks in 4 of the 6 training prompts: 0 ('a sign \"RAIN'), "
        "1 ('a sign \"A\" above \"RAIN'), 2 ('long long "
    )
    assert line.endswith("') and 1 more; close them, or give `text`")
    assert len(line) < 250


def test_describe_rare_terms_adds_up_terms_that_apply_to_as_many_prompts() -> None:
    weights = {"lpips": 0.4, "ssim": 0.2, "ocr": -0.3, "aesthetic": 0.1, "shown": 0.0}
    counts = {"lpips": 0, "ssim": 0, "ocr": 2, "aesthetic": 12, "shown": 0}
    assert describe_rare_terms(weights, counts, 12, set_name="training prompts") == [
        "lpips and ssim (60% of the weight) apply to none of the 12 training prompts",
        "ocr (30% of the weight) applies to 2 of the 12 training prompts",
    ]


@pytest.mark.parametrize(("count", "is_rare"), [(5, True), (6, False)])
def test_describe_rare_terms_calls_less_than_half_few(count: int, is_rare: bool) -> None:
    weights = {"a": 1.0, "b": 1.0, "c": 1.0, "every": 1.0}
    counts = {"a": count, "b": count, "c": count, "every": 12}
    expected = [f"a, b and c (75% of the weight) apply to {count} of the 12 prompts"]
    assert describe_rare_terms(weights, counts, 12, set_name="prompts") == expected * is_rare
