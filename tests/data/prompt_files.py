"""What tests of prompt files share."""

from __future__ import annotations

import json
from pathlib import Path

from glm_grpo.data.prompts import PromptSet, load_prompts


def load(path: Path | str, *, sources: int = 0) -> PromptSet:
    return load_prompts(str(path), height=32, width=32, sources=sources)


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def lines(*rows: dict[str, object]) -> str:
    return "\n".join(map(json.dumps, rows))
