from __future__ import annotations

import html
import json
from urllib.parse import quote

import pytest

from rewards.secrets import hide_secrets, hide_value

AWS_KEY = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLE0KEY"
KEY = 'sk-4f1b/9c&7a"2e<8d'


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "jdg-4f1b9c7a")
    monkeypatch.setenv("LONGER_KEY", "jdg-4f1b9c7a-and-more")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", AWS_KEY)
    # Not secrets, for all their names: short, a word, a path.
    monkeypatch.setenv("SHORT_TOKEN", "1234567")
    monkeypatch.setenv("SORT_KEY", "group_std")
    monkeypatch.setenv("DATASET_KEY", "prompts/train.jsonl")


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("jdg-4f1b9c7a-and-more, jdg-4f1b9c7a", "[hidden], [hidden]"),
        (f"s3 {AWS_KEY}", "s3 [hidden]"),
        ("{'api_key': 'a b', 'model': 'm'}", "{'api_key': [hidden], 'model': 'm'}"),
        ("hub_token: abc, more", "hub_token: [hidden], more"),
        ("http://me:word@scores.example:8700/x", "http://[hidden]@scores.example:8700/x"),
        ("key sk-0123456789abcdefgh refused", "key [hidden] refused"),
    ],
)
def test_hide_secrets_leaves_the_rest(text: str, hidden: str) -> None:
    assert hide_secrets(text) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "1234567 group_std prompts/train.jsonl",
        "vlm_judge.api_key_variable: the environment variable JUDGE_KEY is not set",
        "prompt 'a keyboard: black' at http://127.0.0.1:8000/v1",
        "risk-averse-and-task-driven-prompts",
        "data/sk-SK_prompts_train_2.jsonl",
    ],
)
def test_hide_secrets_leaves_ordinary_texts_alone(text: str) -> None:
    assert hide_secrets(text) == text


@pytest.mark.parametrize(
    "form",
    [
        KEY,
        json.dumps(KEY)[1:-1],
        "".join(f"\\u00{ord(each):02X}" for each in KEY),
        quote(KEY, safe=""),
        html.escape(KEY),
        "".join(f"&#{ord(each)};" for each in KEY),
    ],
)
def test_hide_value_knows_the_forms_in_which_answers_repeat_it(form: str) -> None:
    assert hide_value(f"bad key {form}!", KEY, "[key]") == "bad key [key]!"
