from __future__ import annotations

import pytest

from rewards.secrets import hide_secrets

AWS_KEY = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLE0KEY"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "jdg-4f1b9c7a")
    monkeypatch.setenv("LONGER_KEY", "jdg-4f1b9c7a-and-more")
    monkeypatch.setenv("SHORT_TOKEN", "1234567")
    monkeypatch.setenv("KEYBOARD_LAYOUT", "de-latin1-nodeadkeys")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "falsefalse")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", AWS_KEY)
    # Not secrets, for all their names.
    monkeypatch.setenv("DATASET_KEY", "prompts/train.jsonl")
    monkeypatch.setenv("MODEL_KEY", "zai-org/GLM-Image")
    monkeypatch.setenv("SSH_KEY", "/home/me")
    monkeypatch.setenv("POSTGRES_PASSWORD", "postgres")
    monkeypatch.setenv("SORT_KEY", "group_std")


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("jdg-4f1b9c7a-and-more, jdg-4f1b9c7a", "[hidden], [hidden]"),
        ("api_key = 'abc'\n  next", "api_key = [hidden]\n  next"),
        ("{'api_key': 'a b', 'model': 'm'}", "{'api_key': [hidden], 'model': 'm'}"),
        ("write +wandb_api_key=abc", "write +wandb_api_key=[hidden]"),
        ("hub_token: abc, more", "hub_token: [hidden], more"),
        ("password=abc", "password=[hidden]"),
        ("http://me:word@scores.example:8700/x", "http://[hidden]@scores.example:8700/x"),
        ("key sk-0123456789abcdefgh refused", "key [hidden] refused"),
        (f"s3 {AWS_KEY}", "s3 [hidden]"),
        ("key=sk-proj-abcdefghijklmno1", "key=[hidden]"),
        ("hf_0123456789abcdefgh", "[hidden]"),
        ("ghp_0123456789abcdefghij", "[hidden]"),
        ("AKIAIOSFODNN7EXAMPLE", "[hidden]"),
    ],
)
def test_hide_secrets_leaves_the_rest(text: str, hidden: str) -> None:
    assert hide_secrets(text) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "of the form key=value",
        "vlm_judge.api_key_variable: the environment variable JUDGE_KEY is not set",
        "set train.steps=3",
        "prompt 'a keyboard: black' at http://127.0.0.1:8000/v1",
        "mail a@b.example",
        "",
        "1234567",
        "de-latin1-nodeadkeys",
        "falsefalse",
        "risk-averse-and-task-driven-prompts",
        'a desk-lamp that says "hf_"',
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "outputs/2026-01-01/00-00-00",
        "prompts/train.jsonl",
        "zai-org/GLM-Image",
        "/home/me/train.jsonl",
        "/home/postgres/train.jsonl",
        "group_std",
        "data/sk-SK_prompts_train.jsonl",
        "data/sk-SK_prompts_train_2.jsonl",
        "sk-SK_prompts_train.jsonl",
        "/models/hf_glmimageadapterv2",
        "hf_glmimageadapterversion",
        "outputs/run-sk-learn-experiments-12",
    ],
)
def test_hide_secrets_leaves_ordinary_texts_alone(text: str) -> None:
    assert hide_secrets(text) == text
