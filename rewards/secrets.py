"""Keys and tokens, which stay in the environment: hidden wherever else they turn up."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from html.entities import html5

HIDDEN = "[hidden]"

_NAME_OF_SECRET = re.compile(r"\w*(KEY|TOKEN|SECRET|PASSWORD|PASSWD)", re.IGNORECASE)
_SHORTEST = 8
"""Characters; shorter values, such as `1`, stand in texts that have nothing to do with them."""
_WORD = re.compile("[a-z_]+")
_BASE64 = re.compile(r"(?=.*[a-z])(?=.*[A-Z])(?=.*\d)[A-Za-z\d+/]{32,}=*")
"""Form of a secret with slashes, those of AWS among them; paths have dots, dashes or fewer
characters."""
_KNOWN_FORMS = re.compile(
    r"(?<![\w./-])"
    r"(sk-(?=[\w-]*\d)[\w-]{16,}|hf_(?=[A-Za-z0-9]*\d)[A-Za-z0-9]{16,}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AIza[\w-]{30,}|AKIA[A-Z0-9]{16})"
)
"""How keys of OpenAI (and of those who took over its form), Hugging Face, GitHub, Google and AWS
look: not inside a path or a longer name, the first two with a digit."""
_ASSIGNED = re.compile(
    r"""((?:api_?key|_key|\btoken|_token|secret|password|passwd)["']?\s*[=:]\s*)"""
    r"""("[^"\n]*"|'[^'\n]*'|[^\s"',;}]+)""",
    re.IGNORECASE,
)
_USER_OF_URL = re.compile(r"(\w://)[^/\s@'\"]+@")


def hide_secrets(text: str) -> str:
    """A text for a terminal or a log without the secrets in it.

    Left out are the values of environment variables whose names end in KEY, TOKEN, SECRET or
    PASSWORD, of eight characters or more, that are neither a plain lower-case word nor a path; what
    has the form of a key of a known service; what is assigned to a name that ends like one
    of a key (`api_key='...'`); and user and password of an address. A secret of another form, under
    another name, is not recognised.
    """
    for value in sorted(_environment_secrets().values(), key=len, reverse=True):
        text = hide_value(text, value, HIDDEN)
    text = _KNOWN_FORMS.sub(HIDDEN, text)
    text = _ASSIGNED.sub(rf"\1{HIDDEN}", text)
    return _USER_OF_URL.sub(rf"\1{HIDDEN}@", text)


def hide_value(text: str, value: str, instead: str) -> str:
    """A text without a value, as it is and as JSON, addresses and HTML escape it, in part or whole.

    To be called before the text is cut, which could cut the value.
    """
    return _in_any_form(value).sub(lambda found: instead, text) if value else text


@lru_cache(maxsize=64)
def _in_any_form(value: str) -> re.Pattern[str]:
    return re.compile("".join(f"(?:{'|'.join(_forms(character))})" for character in value))


def _forms(character: str) -> Iterator[str]:
    code = ord(character)
    yield re.escape(character)
    yield rf"\\+{re.escape(character)}"
    yield rf"(?i:\\+(?:u00{code:02x}|x{code:02x}|u\{{0*{code:x}\}}))"
    yield rf"(?i:%(?:25)*{code:02x})"
    yield rf"(?i:&(?:amp;)*#(?:0*{code}|x0*{code:x});?)"
    # Some names end without a semicolon too.
    for name in (name for name, meant in html5.items() if meant == character):
        yield rf"&(?:amp;)*{re.escape(name)}"


def _environment_secrets() -> Mapping[str, str]:
    return {
        variable: value
        for variable, value in os.environ.items()
        if _NAME_OF_SECRET.fullmatch(variable) and _can_be_secret(value)
    }


def _can_be_secret(value: str) -> bool:
    # DATASET_KEY, MODEL_KEY or SSH_KEY may name a column, a hub id or a path.
    if len(value) < _SHORTEST or _WORD.fullmatch(value):
        return False
    return "/" not in value or _BASE64.fullmatch(value) is not None
