"""A prompt through the steps, as an animation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from glm_grpo import cli
from glm_grpo.gallery.film import find_frames, write_film


def frames_of(path: Path) -> list[Image.Image]:
    with Image.open(path) as film:
        frames = []
        for index in range(film.n_frames):  # type: ignore[attr-defined]
            film.seek(index)
            frames.append(film.convert("RGB"))
    return frames


@pytest.mark.parametrize("suffix", [".gif", ".webp"])
def test_film_shows_a_held_out_prompt_at_every_evaluation(
    run: Any, tmp_path: Path, suffix: str
) -> None:
    for step in (0, 4, 8):
        run.record_evaluation(step)
    path = tmp_path / f"kite{suffix}"
    cli.main(["gallery", str(run.folder.path), "--film", str(path), "--prompt", "kite"])
    frames = frames_of(path)
    assert len(frames) == 3
    # 8 pixels, 48 times as large, above a caption that differs from step to step.
    assert frames[0].size == (384, 384 + 36)
    captions = [frame.crop((0, 384, 384, 420)).tobytes() for frame in frames]
    assert len(set(captions)) == 3
    with Image.open(path) as film:
        assert film.info["loop"] == 0


def test_film_shows_the_first_held_out_prompt_or_the_best_sample_of_a_training_prompt(
    run: Any,
) -> None:
    run.record_step(1)
    run.record_step(3)
    frames = find_frames(run.folder, "kite")
    assert [(frame.step, frame.image) for frame in frames] == [
        (1, "images/step-000001/kite-1.png"),
        (3, "images/step-000003/kite-1.png"),
    ]
    run.record_evaluation(4)
    (frame,) = find_frames(run.folder, None)
    assert (frame.step, frame.image) == (4, "images/eval-000004/kite-0.png")
    # 0.4 * 0.1 + 0.2 * 0.2 + 0.3 * 0.3 + 0.1 * 0.4.
    assert frame.total == pytest.approx(0.21)


def test_film_shrinks_large_pictures(run: Any, tmp_path: Path) -> None:
    run.size = 1024
    run.record_evaluation(0)
    write_film(run.folder, tmp_path / "large.webp")
    assert frames_of(tmp_path / "large.webp")[0].size == (768, 768 + 36)


def test_film_of_an_unknown_prompt_is_refused(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.record_evaluation(0)
    arguments = ["gallery", str(run.folder.path), "--film", str(tmp_path / "x.gif")]
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments, "--prompt", "boat"])
    assert ended.value.code == 2
    assert "no image of the prompt 'boat'" in capsys.readouterr().err
    assert not (tmp_path / "x.gif").exists()
