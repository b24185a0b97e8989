"""The detector of one's own on the page about compositions, as a reader would use it."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from glm_grpo.cli import main
from glm_grpo.tiny.objects.prompts import object_prompts
from rewards import score_images
from tests.site.pages import blocks

PAGE = "docs/composition.md"
COMMAND = "glm-grpo check --config-name tiny_objects "
FEWER = ("rollout.prompts_per_step=1", "rollout.group_size=2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the file that the page shows."""
    (code,) = [each.text for each in blocks(PAGE) if each.text.startswith("# my_detector.py")]
    (tmp_path / "my_detector.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_finds_what_right_images_of_the_miniature_show(folder: Path) -> None:
    prompts = [*object_prompts("objects-heldout", height=128, width=128)]
    images = [Image.fromarray(each.target.permute(1, 2, 0).numpy()) for each in prompts]
    term = {
        "weight": 1.0,
        "detector": "my_detector.py:detect",
        "clip_weights": None,
        "score": "verdict",
        "threshold": 0.8,  # as in the config of the miniature
    }
    reward = {"terms": {"composition": term}}
    assert score_images(prompts, images, reward)["composition"].tolist() == [1.0] * len(prompts)
    # Images of other prompts are mostly wrong.
    others = [*images[1:], images[0]]
    assert score_images(prompts, others, reward)["composition"].mean() < 0.5


def test_the_command_of_the_page_scores_what_the_miniature_draws(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = [
        line for each in blocks(PAGE) for line in each.text.splitlines() if line.startswith(COMMAND)
    ]
    main(["check", "--config-name", "tiny_objects", *line.removeprefix(COMMAND).split(), *FEWER])
    assert "one rollout: composition 0." in capsys.readouterr().out
