"""The generated pages of the reference are those of the code as it is."""

from __future__ import annotations

import re

from glm_grpo.config.root import Config
from rewards.problems import walk_fields
from tools.site.reference import config_page, pages


def test_generated_pages_are_up_to_date() -> None:
    outdated = [file.name for file, text in pages().items() if file.read_text() != text]
    assert outdated == [], "run `python -m tools.site.reference` and commit what it writes"


def test_every_key_has_an_entry() -> None:
    entries = set(re.findall(r"^#### `(.+)`$", config_page(), flags=re.MULTILINE))
    # Sections themselves, and what every term has, stand under one name.
    keys = {
        re.sub(r"^reward\.terms\.\w+\.", "reward.terms.<name>.", key)
        if key.startswith("reward.terms.") and key not in entries
        else key
        for key, field in walk_fields(Config)
        if key.count(".") or key in ("offload", "trackers", "run_dir")
    }
    assert keys - entries == {"reward.terms", "reward.terms.<name>.kind"} | {
        key for key in keys if re.fullmatch(r"reward\.terms\.\w+", key)
    }
