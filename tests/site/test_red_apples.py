"""The rows that the page about apples and cups writes, as `reward=composition` takes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from glm_grpo.commands.init import init_folder
from glm_grpo.config import compose_config
from glm_grpo.data.prompts import load_prompts, shared_rows
from glm_grpo.models.base import ReservedTokens
from rewards.terms.composition_rows import read_composition
from tests.site.pages import blocks

PAGE = "docs/tutorials/red_apples.md"


def test_the_page_writes_rows_that_say_what_their_prompts_ask_for(tmp_path: Path) -> None:
    (script,) = [each.text for each in blocks(PAGE) if each.text.startswith("# make_rows.py")]
    folder = tmp_path / "apples"
    list(init_folder(folder, "janus_pro_1b_16gb"))
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    config = compose_config(folder, None, ["run_dir=r", "reward=composition_preference"])
    training, held_out = (
        load_prompts(path, height=384, width=384, reserved=ReservedTokens())
        for path in (config.data.path, config.data.eval_path)
    )
    assert (len(training), len(held_out)) == (300, 60)
    assert not shared_rows(held_out, training)
    for prompt, metadata in zip(training.captions(), training.metadata(), strict=True):
        asked = read_composition(metadata)
        assert asked is not None
        cup, apples = asked.include
        assert apples.other == 0
        # "two red apples left of a green cup"
        words = prompt.split(" ")
        assert words[1] == apples.colour
        assert words[2].removesuffix("s") == apples.label
        assert f" {apples.relation} a {cup.colour} {cup.label}" in prompt
        assert (words[0] == "a") == (apples.count == 1)
