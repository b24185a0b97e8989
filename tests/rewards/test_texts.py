from __future__ import annotations

import pytest

from rewards.texts import (
    find_escaped_break,
    find_escaped_mark,
    find_quoted_texts,
    has_idle_marks,
)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("a sign", ()),
        ("a sign that says 'STOP'", ("STOP",)),
        # Word for word the same, however it is quoted.
        ("\u201cSTOP\u201d over \u300cSTOP\u300d", ("STOP",)),
        ('it reads "OPEN". The letters of " OPEN" are red', ("OPEN",)),
        ('"OPEN" above "Open" and "OPEN 24 H"', ("OPEN", "Open", "OPEN 24 H")),
        ("\"C\" \u201cB\u201d 'A' \u300cD\u300d", ("C", "B", "A", "D")),
        ('empty "" and blank " "', ()),
        ('unclosed "STOP', ()),
        ('" padded "', ("padded",)),
        # Of other languages: German, French, Swedish, Polish, Japanese, full-width.
        (
            "\u201eHALT\u201c \u201aJA\u2018 \u00bbNEIN\u00ab \u203aDA\u2039",
            ("HALT", "JA", "NEIN", "DA"),
        ),
        ("\u00ab\u00a0OUI\u00a0\u00bb et \u2039A\u203a", ("OUI", "A")),
        ("\u201dHEJ\u201d \u201eTAK\u201d", ("HEJ", "TAK")),
        ("\u300e\u55b6\u696d\u4e2d\u300f \uff02OPEN\uff02", ("\u55b6\u696d\u4e2d", "OPEN")),
        ("\u2018OPEN\u2019", ("OPEN",)),
        # Apostrophes.
        ("a dog's bowl, a cat's bowl", ()),
        ("a dog's collar with 'REX' on it", ("REX",)),
        ("don't: a sign \"OPEN\", it's red", ("OPEN",)),
        ('"DON\'T" and "WON\'T"', ("DON'T", "WON'T")),
        ("'DON'T' and \u2018WON\u2019T\u2019", ("DON'T", "WON\u2019T")),
        ("the dogs' bowl, the cats' 'STOP'", ("STOP",)),
        ("'tis the '90s 'OPEN'", ("OPEN",)),
        ("fish 'n' chips, rock n' roll", ()),
        ("rock 'n' roll, Salt 'N' Pepper 'LIVE'", ("LIVE",)),
        ("rock \u2018n\u2019 roll and 'Rock 'n' Roll'", ("Rock 'n' Roll",)),
        # A letter, not the word "and".
        ("the letter 'n' in red, the 'n' key, 'N' on a compass", ("n", "N")),
        # A mark that may belong to a word does not close before one that cannot.
        ("'Dogs' Home'", ("Dogs' Home",)),
        (
            "a sign 'LADIES' NIGHT' and \u2018MENS\u2019 ROOM\u2019",
            ("LADIES' NIGHT", "MENS\u2019 ROOM"),
        ),
        ("'Guns N' Roses' tour, 'Lovin' You'", ("Guns N' Roses", "Lovin' You")),
        ("'CATS' in red, 'Cats' and 'Dogs'", ("CATS", "Cats", "Dogs")),
        ("'CATS' beside the dogs' bowl", ("CATS",)),
        ("'Cats' and \"Dogs' Home\"", ("Cats", "Dogs' Home")),
        # An apostrophe that shortens a word opens no quotation that only another one could close.
        ("the '90s band \"Guns N' Roses\"", ("Guns N' Roses",)),
        ("the '90s kids' show of 'em girls' club \"FUN\"", ("FUN",)),
        ("signs '90s' and 'Tis the season'", ("90s", "Tis the season")),
        ("the '90s \"Dogs'\"", ("Dogs'",)),
        ("\u043f'\u044f\u0442\u044c 'OPEN'", ("OPEN",)),
        # Where words have none, letters stand beside quotations.
        (
            "\u724c\u5b50'\u4f60\u597d'\u7684, \uc548'\ub155'\uc774\ub77c",
            ("\u4f60\u597d", "\ub155"),
        ),
        # Marks of units open no quotation; after a digit, a mark can only close one.
        ('a 12" vinyl record with the label "JAZZ"', ("JAZZ",)),
        ('a 12" x 24" poster, "A" on it', ("A",)),
        ('3\u00bd" nails in a box "NAILS"', ("NAILS",)),
        ("12'' and 7'' records, 'JAZZ' on both", ("JAZZ",)),
        ("5'10\" tall, a cap 'UP', 6'2\" tall", ("UP",)),
        ("at 40\u00b026'46\"N a sign 'N'", ("N",)),
        ("a 12\u201d record and a 7\u201d one, \u201cJAZZ\u201d", ("JAZZ",)),
        ('a 12\u2033 record, 5\u2032 away, "JAZZ"', ("JAZZ",)),
        ("\"Route 66\" and '2024' and \u201c7\u201d", ("Route 66", "2024", "7")),
        ('"24""OPEN"', ("24", "OPEN")),
        ("'24''OPEN'", ("24", "OPEN")),
        ("a sign '90s NIGHT'", ("90s NIGHT",)),
        # Before a letter it opens one.
        ('\u5199\u774012"\u8425\u4e1a"\u548c"\u6b22\u8fce"', ("\u8425\u4e1a", "\u6b22\u8fce")),
        ('Level 3"PARKING" and "EXIT"', ("PARKING", "EXIT")),
        ('a 12"x18" print, "A" on it', ("A",)),
        # Chinese and Japanese need no space between a digit and a quotation.
        (
            "2024\u201c\u65b0\u5e74\u201d 7\u300c\u516b\u300d 8\uff02\u4e5d\uff02",
            ("\u65b0\u5e74", "\u516b", "\u4e5d"),
        ),
        # One inside another.
        ("\"the 'BIG' one\"", ("the 'BIG' one",)),
        ("'the \"BIG\" one'", ('the "BIG" one',)),
        ("\u300cA\u300eB\u300f\u300d", ("A\u300eB\u300f",)),
    ],
)
def test_find_quoted_texts(prompt: str, texts: tuple[str, ...]) -> None:
    assert find_quoted_texts(prompt) == texts


@pytest.mark.parametrize(
    ("prompt", "is_idle"),
    [
        ("a dog's bowl in the '90s, the cats' \"OPEN\"", False),
        ('"the \'BIG one"', False),
        ('a 12" record', False),
        ('the "12" record"', True),
        ('a sign "OPEN', True),
        ('a sign "A" above "OPEN', True),
        ("a sign 'OPEN", True),
        ("rock 'n' roll, rock 'n roll, 'tis the season", False),
        ("a sign \u201eOPEN", True),
        ('a sign ""', True),
    ],
)
def test_has_idle_marks(prompt: str, is_idle: bool) -> None:
    assert has_idle_marks(prompt) is is_idle


@pytest.mark.parametrize(
    ("prompt", "escaped"),
    [
        (r"a sign \"OPEN\" here", r"\"OPEN\""),
        (r'"the \"BIG\" one"', r"\"BIG\""),
        (r"a sign \"DON'T\"", r"\"DON'T\""),
        (r"a sign \'OPEN\'", r"\'OPEN\'"),
        (r'a sign "DON\'T"', r"\'"),
        # Backslashes that are meant.
        (r'drives "C:\" and "D:\"', ""),
        (r'the keys "/" and "\"', ""),
        (r"a shrug \_o_/", ""),
    ],
)
def test_find_escaped_mark(prompt: str, escaped: str) -> None:
    assert find_escaped_mark(prompt) == escaped


@pytest.mark.parametrize(
    ("prompt", "escaped"),
    [
        (r'"GRAND\nOPENING"', r'"GRAND\n'),
        (r"a sign\r\nin red", r"sign\r\n"),
        (r"a sign \n in red", r"\n"),
        # Paths.
        (r'a screen "C:\new" and "D:\docs\new"', ""),
        ("a sign\nin red", ""),
    ],
)
def test_find_escaped_break(prompt: str, escaped: str) -> None:
    assert find_escaped_break(prompt) == escaped
