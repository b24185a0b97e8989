"""The rows that the page about apples and cups writes, as `reward=composition` takes them."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

from glm_grpo.commands.init import init_folder
from glm_grpo.config import compose_config
from glm_grpo.data.prompts import load_prompts, shared_rows
from glm_grpo.models.base import ReservedTokens
from rewards.terms.composition_rows import Condition, read_composition
from tests.site.pages import blocks

PAGE = "docs/tutorials/red_apples.md"


def test_the_page_writes_rows_that_say_what_their_prompts_ask_for(tmp_path: Path) -> None:
    (script,) = [each.text for each in blocks(PAGE) if each.text.startswith("# make_rows.py")]
    folder = tmp_path / "apples"
    list(init_folder(folder, "janus_pro_1b_16gb", "composition_preference"))
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    config = compose_config(folder, None, ["run_dir=r"])
    training, held_out = (
        load_prompts(path, height=384, width=384, reserved=ReservedTokens())
        for path in (config.data.path, config.data.eval_path)
    )
    assert len(held_out) == 60
    assert len(training) > 300
    assert not shared_rows(held_out, training)
    assert "two red apples left of a green cup" in held_out.captions()
    # `eval` gives an interval from ten prompts of a tag.
    tags = Counter(each["tag"] for each in held_out.metadata())
    assert tags == dict.fromkeys(("colors", "counting", "position", "color_attr"), 15)
    for prompt, metadata in zip(training.captions(), training.metadata(), strict=True):
        asked = read_composition(metadata)
        assert asked is not None
        if metadata["tag"] == "color_attr":
            assert [each.count for each in asked.include] == [1, 1]
        for each in asked.include:
            number = ("a", "two", "three")[each.count - 1]
            assert f"{number} {each.colour} {each.label}" in prompt
            assert Condition(each.label, each.count + 1) in asked.exclude
            if each.relation is not None:
                other = asked.include[each.other or 0]
                assert f" {each.relation} a {other.colour} {other.label}" in prompt
