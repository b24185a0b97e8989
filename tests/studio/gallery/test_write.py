from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from glm_grpo.run.writing import append_metrics, truncate_after
from glm_grpo.studio.gallery import update_gallery, write_gallery

STATIC = Path(__file__).parents[3] / "glm_grpo" / "studio" / "gallery" / "static"


def state(run: Any, part: str) -> dict[str, int]:
    """The files of a part; a file that is written again has another number."""
    return {name: (run.gallery / part / name).stat().st_ino for name in run.files(part)}


def test_write_gallery_copies_scripts_styles_and_licences(run: Any) -> None:
    write_gallery(run.folder, ())
    assert "vendor/LICENSES.txt" in run.files("assets")
    for name in run.files("assets"):
        assert (run.gallery / "assets" / name).read_bytes() == (STATIC / name).read_bytes()
    assert len(run.files("assets")) == sum(path.is_file() for path in STATIC.rglob("*"))


def test_page_loads_every_script_and_style_once_and_the_run_last(
    run: Any, read_page: Callable[[Path], Any]
) -> None:
    page = read_page(write_gallery(run.folder, ()))
    scripts = [script["src"] for script in page.all("script")]
    assert scripts[-1] == "data/run.js"
    assert sorted(scripts[:-1]) == sorted(
        f"assets/{name}" for name in run.files("assets") if name.endswith(".js")
    )
    sheets = [link["href"] for link in page.all("link") if link["rel"] == "stylesheet"]
    assert sorted(sheets) == sorted(
        f"assets/{name}" for name in run.files("assets") if name.endswith(".css")
    )
    assert all(set(script) == {"src"} for script in page.all("script"))


def test_page_refers_to_nothing_outside_the_gallery(
    run: Any, read_page: Callable[[Path], Any]
) -> None:
    run.prompts = run.prompts[::-1]
    run.record_step(1)
    page = read_page(write_gallery(run.folder, ()))
    for link in page.linked():
        assert (run.gallery / str(link)).is_file()
    policy = next(meta["content"] for meta in page.all("meta") if "http-equiv" in meta)
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    assert "unsafe-eval" not in policy


def test_page_keeps_a_hostile_name_of_a_run_as_text(
    make_run: Callable[..., Any], read_page: Callable[[Path], Any]
) -> None:
    run = make_run("<img src=x onerror=alert(1)> #1 50% \udce4")
    page = read_page(write_gallery(run.folder, ()))
    assert page.all("img") == []
    assert run.data("run")["name"].endswith("/ <img src=x onerror=alert(1)> #1 50% \ufffd")


def test_write_gallery_twice_gives_the_same_files(run: Any) -> None:
    run.record_evaluation(0)
    run.record_step(1)
    write_gallery(run.folder, ())
    before = {name: (run.gallery / name).read_bytes() for name in run.files(".")}
    made_once = state(run, "assets"), state(run, "thumbs")
    write_gallery(run.folder, ())
    assert {name: (run.gallery / name).read_bytes() for name in run.files(".")} == before
    assert (state(run, "assets"), state(run, "thumbs")) == made_once


def test_update_gallery_step_by_step_ends_like_a_whole_rebuild(run: Any) -> None:
    run.record_evaluation(0)
    append_metrics(run.folder, 0, {"eval/total": 0.5})
    update_gallery(run.folder, 0)
    for step in (1, 2, 3, 4, 10, 11):
        run.record_step(step)
        update_gallery(run.folder, step)
        # What a reload shows now: the step, its images, and all before.
        listed = [n for chunk in run.data("run")["chunks"] for n in chunk["steps"]]
        assert listed == [each for each in (1, 2, 3, 4, 10, 11) if each <= step]
        entry = run.data("steps-000001" if step <= 10 else "steps-000011")["steps"][-1]
        assert entry["step"] == step
        assert len(entry["groups"]) == 2
        assert f"step-{step:06d}/kite-0.webp" in run.files("thumbs")
        if step in (4, 11):
            run.record_evaluation(step)
            append_metrics(run.folder, step, {"eval/total": 0.75})
            update_gallery(run.folder, step)
            assert run.data("run")["evaluations"][-1]["step"] == step
            assert run.data(f"evaluation-{step:06d}")["groups"][0]["prompt_id"] == "kite"
    assert run.data("steps-000001")["metrics"][4]["eval/total"] == 0.75
    before = {name: (run.gallery / name).read_bytes() for name in run.files(".")}
    write_gallery(run.folder, ())
    assert {name: (run.gallery / name).read_bytes() for name in run.files(".")} == before


def test_update_gallery_writes_only_what_the_step_changed(run: Any) -> None:
    run.record_evaluation(0)
    for step in (1, 10, 11):
        run.record_step(step)
    update_gallery(run.folder, 11)
    data, thumbs, assets = state(run, "data"), state(run, "thumbs"), state(run, "assets")
    page = run.folder.gallery_path.stat().st_ino
    run.record_step(12)
    update_gallery(run.folder, 12)
    changed = {name for name, number in state(run, "data").items() if data.get(name) != number}
    assert changed == {"run.js", "steps-000011.js"}
    added = {name for name, number in state(run, "thumbs").items() if thumbs.get(name) != number}
    assert added == {f"step-000012/{name}.webp" for name in ("kite-0", "kite-1", "b-0", "b-1")}
    assert state(run, "assets") == assets
    assert run.folder.gallery_path.stat().st_ino == page


def test_list_of_files_is_written_after_all_that_it_lists(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.record_evaluation(0)
    run.record_step(1)
    update_gallery(run.folder, 1)
    run.record_step(11)
    run.record_evaluation(11)
    written = []
    replace = Path.replace

    def note(source: Path, target: Path) -> Path:
        written.append(target.relative_to(run.gallery).as_posix())
        return replace(source, target)

    monkeypatch.setattr(Path, "replace", note)
    update_gallery(run.folder, 11)
    place = written.index("data/run.js")
    assert {"data/steps-000011.js", "data/evaluation-000011.js"} <= set(written[:place])
    assert sum(name.startswith("thumbs/") for name in written[:place]) == 8
    assert not [name for name in written[place:] if name.startswith(("data/s", "data/e", "thumbs"))]


def test_write_gallery_removes_what_no_longer_belongs(run: Any) -> None:
    run.places = torch.ones(2, 2, 1, 1)
    for step in (1, 2, 11):
        run.record_step(step)
        run.record_evaluation(step)
    write_gallery(run.folder, ())
    (run.gallery / "assets" / "old.js").write_text("1")
    (run.gallery / "mine.txt").write_text("kept")
    truncate_after(run.folder, 1)
    write_gallery(run.folder, ())
    kept = ["credit-000001.js", "evaluation-000001.js", "run.js", "steps-000001.js"]
    assert run.files("data") == kept
    folders = {name.split("/")[0] for name in run.files("thumbs")}
    assert folders == {"eval-000001", "step-000001", "targets", "train-targets"}
    assert "old.js" not in run.files("assets")
    assert (run.gallery / "mine.txt").is_file()
