"""The blocks of code in the README and in docs/, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md")))

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
_HERE = re.compile(r"cat > (\S+) << '(\w+)'\n(.*?)^\2\n", flags=re.MULTILINE | re.DOTALL)
_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and what stands in it."""

    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """One command of a shell block, its words as a shell would part them."""

    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.words[0]


@dataclass(frozen=True)
class WrittenFile:
    """A file that a shell block writes by `cat > NAME << 'END'`."""

    name: str
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(*found) for found in _BLOCK.findall((ROOT / page).read_text())]


def shell(text: str) -> Iterator[Command | WrittenFile]:
    """What a shell block does, in order."""
    place = 0
    for here in _HERE.finditer(text):
        yield from _commands(text[place : here.start()])
        yield WrittenFile(here[1], here[3])
        place = here.end()
    yield from _commands(text[place:])


def _commands(text: str) -> Iterator[Command]:
    pending = ""
    for line in text.replace("\\\n", " ").splitlines():
        pending += f"{line}\n"
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quotation goes on in the next line
            continue
        pending = ""
        while words and _ASSIGNMENT.fullmatch(words[0]):
            words = words[1:]
        if words:
            yield Command(tuple(words))
    assert not pending, f"a quotation without an end: {pending[:80]}"
