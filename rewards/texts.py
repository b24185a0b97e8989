"""Find the texts that a prompt asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator

_IN_WORD = "[0-9A-Za-z\u00c0-\u0587\u1e00-\u1fff]"
"""Digits, and letters of the scripts whose words contain apostrophes: Latin, Greek, Cyrillic,
Armenian. Other letters may be adjacent to a quotation."""

_APOSTROPHE = rf"(?<={_IN_WORD})['\u2019](?={_IN_WORD})"

_UNIT = "(?<=[\\d\u00bc-\u00be\u2150-\u215e])(?:''|['\"\u201d])(?=[x\u00d7]?\\d|[\\W\\d_]|$)"
"""A mark after a digit or a fraction, and not before a letter: feet, inches or minutes. Before a
letter it opens a quotation, as in Chinese and Japanese, which put no space there. Word processors
write inches as a closing curly mark, with which Swedish quotations open."""

_AND = (
    "(?<=[^\\W\\d_] )(?<!letter )(?<!the )(?<!an )"
    "(?:['\u2018\u2019]?n['\u2019](?= [^\\W\\d_])|['\u2018\u2019]?N['\u2019](?= [A-Z]))"
)
"""The `'n'` of rock 'n' roll, a capital only before another one; not the letter 'n'."""

_SHORTENED = rf"(?i:\d\ds?|n|tis|twas|til|em|cause|bout|round)(?!{_IN_WORD}|['\u2019])"
"""What an apostrophe rather than a quotation mark usually begins: '90s, 'tis."""

_WORD_END = "(?:(?<=[sxzSXZ\\d])|(?<=in)|(?<=IN)|(?<=\\W[nN]))['\u2019](?=\\s+[^\\W\\d_])"
"""A mark before a further word that may belong to the one before it: dogs' home, lovin' you, 5'."""

_INSIDE = "|".join(
    (_AND, _APOSTROPHE, '(?<=\\d)["\u201d]', '"[^"]*"', "\u201c[^\u201c\u201d]*\u201d")
)
"""What may stand between single marks besides other characters."""


def _between_single(opening: str, closing: str) -> tuple[str, str]:
    """Patterns of a quotation in single marks, which are apostrophes, too.

    The first one reads on over marks that may belong to a word, up to one that cannot: otherwise,
    'Dogs' Home' would end after Dogs. If there is none, the first mark of them closes.
    """
    text = f'(?:{_INSIDE}|[^{opening}{closing}"\u201c\u201d])*+'
    before, after = f"(?<!{_IN_WORD}){opening}", f"[{closing}](?!{_IN_WORD})"
    return (
        f"{before}({text}(?:{_WORD_END}{text})*+)(?<!\\s)(?!{_WORD_END}){after}",
        f"{before}(?!{_SHORTENED})({text}){after}",
    )


_QUOTATION = re.compile(
    "|".join(
        (
            _UNIT,
            _AND,
            *_between_single("'", "'"),
            *_between_single("\u2018", "\u2019"),
            *_between_single("\u201a", "\u2018\u2019"),
            r'"([^"]*)"',
            "\uff02([^\uff02]*)\uff02",
            "\u201c([^\u201c\u201d]*)\u201d",
            "\u201e([^\u201e\u201c\u201d]*)[\u201c\u201d]",
            "\u201d([^\u201c\u201d]*)\u201d",
            "\u00ab([^\u00ab\u00bb]*)\u00bb",
            "\u00bb([^\u00ab\u00bb]*)\u00ab",
            "\u2039([^\u2039\u203a]*)\u203a",
            "\u203a([^\u2039\u203a]*)\u2039",
            "\u300c([^\u300c\u300d]*)\u300d",
            "\u300e([^\u300e\u300f]*)\u300f",
        )
    )
)
"""Pairs of marks, each with a group for the text in between; and marks that quote nothing.

The search goes from left to right, so a mark after a digit still closes a quotation."""

_MARK = re.compile(
    '["\uff02\u201a\u201c\u201d\u201e\u00ab\u00bb\u2039\u203a\u300c\u300d\u300e\u300f]'
    rf"|(?<!{_IN_WORD})['\u2018](?!{_SHORTENED})(?=[^\W\d_])"
)
"""A quotation mark; an apostrophe only if it can open a quotation, unlike that of the '90s."""

_ESCAPED = re.compile(rf"""\\"[^"]*\\"|\\'[^']*\\'|(?<={_IN_WORD})\\'(?={_IN_WORD})""")
"""Two escaped marks with a text in between, or an escaped apostrophe. A single escaped mark may be
meant, as in "C:\\"."""

_ESCAPED_BREAK = re.compile(r"""(?<![^\s"'\u2018\u201c\u201e\u00ab\u300c])[^\s:\\]*(?:\\r)?\\n""")
"""A line break written as in JSON or source code; not in a path, as C:\\new."""


def find_quoted_texts(prompt: str) -> tuple[str, ...]:
    """Find the texts that a prompt asks for: those it quotes, from left to right, each once.

    Quotations are '', "", full-width "", curly ones, those of other languages (low or reversed
    curly ones, guillemets either way) and corner brackets. An apostrophe after a letter or digit
    opens none, and one before a letter or digit closes none. A straight mark after a digit (12",
    5'10") opens none. Nested quotations are part of the outer one. Blank quotations ask for
    nothing. A text that is repeated word for word is mentioned again, not asked for again.

    GLM-Image's glyph encoder uses a different rule.
    """
    return tuple(dict.fromkeys(text for text in _quotations(prompt) if text))


def has_idle_marks(prompt: str) -> bool:
    """Whether a quotation mark asks for nothing: it is unpaired, or nothing is inside the pair."""
    rest = _QUOTATION.sub(" ", prompt)
    return not all(_quotations(prompt)) or _MARK.search(rest) is not None


def _quotations(prompt: str) -> Iterator[str]:
    """Yield each quotation, "" if it is blank."""
    for match in _QUOTATION.finditer(prompt):
        for text in match.groups():
            if text is not None:
                yield text.strip()


def find_escaped_mark(prompt: str) -> str:
    """Find quotation marks that were escaped as in JSON or source code; "" if there are none.

    The backslash would become part of the text that the prompt asks for.
    """
    found = _ESCAPED.search(prompt)
    return found[0] if found else ""


def find_escaped_break(prompt: str) -> str:
    """Find a word with a line break that is a backslash and an n; "" if there is none."""
    found = _ESCAPED_BREAK.search(prompt)
    return found[0] if found else ""
