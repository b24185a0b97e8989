"""The Weights view: its figures are those of `glm-grpo rescore`, and it says what it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml
from playwright.sync_api import Page, expect

from glm_grpo.config import compose_config
from glm_grpo.errors import ConfigError
from glm_grpo.run.config import read_config
from glm_grpo.run.folder import RunFolder
from glm_grpo.studio.gallery import write_gallery
from glm_grpo.studio.rescore.rescore import override_weighing, rescore
from tests.browser.conftest import (
    DAMAGED_STEP,
    NOT_FOUND,
    OpenGallery,
    change_data,
    copy_run,
    make_config,
    show,
)


@pytest.fixture(scope="module")
def whole_run(gallery_run: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The run of the other tests without its torn table, which `rescore` refuses."""
    run = copy_run(gallery_run, tmp_path_factory.mktemp("weights") / "run")
    run.rollout_path(DAMAGED_STEP).unlink()
    write_gallery(run, ())
    return run


def fragment(**params: object) -> str:
    """Address of the view; double underscores stand for the dot of a weight."""
    named = {name.replace("__", "."): value for name, value in params.items()}
    return f"weights?{urlencode(named)}"


def read_figure(page: Page, name: str) -> list[float]:
    """The exact numbers behind a figure of the summary; NaN where there is none."""
    numbers = page.locator(f"[data-figure={name}] data")
    # All figures come in one rendering.
    numbers.first.wait_for()
    values = numbers.evaluate_all("all => all.map((one) => one.getAttribute('value'))")
    return [float(value or "nan") for value in values]


def read_shares(page: Page) -> dict[str, list[float]]:
    """Share in the run and now, by term."""
    rows = page.locator(".weights-term").all()
    return {
        row.locator("label").inner_text(): row.locator("data").evaluate_all(
            "all => all.map((one) => Number(one.getAttribute('value')))"
        )
        for row in rows
    }


def read_overrides(page: Page) -> list[str]:
    """What the shown command passes to `glm-grpo rescore`, as soon as it is there."""
    program, command, run, *overrides = shlex.split(page.locator("pre").nth(1).inner_text())
    assert (program, command, run) == ("glm-grpo", "rescore", "RUN")
    return overrides


def assert_shows(page: Page, run: RunFolder, overrides: list[str]) -> None:
    """That the page shows what `glm-grpo rescore` computes for a run, and names the command."""
    command = " ".join(["glm-grpo rescore RUN", *overrides])
    # In one rendering with the figures.
    expect(page.locator("pre").nth(1)).to_have_text(command)
    expected = rescore(run, overrides)
    assert read_figure(page, "winners") == [expected.changed_winners]
    assert read_figure(page, "zero-std") == [expected.zero_std_before, expected.zero_std_after]
    assert read_figure(page, "images") == [expected.images]
    assert read_figure(page, "tau") == pytest.approx([expected.rank_correlation], abs=1e-6)
    shares = {term.name: [term.share_before, term.share_after] for term in expected.terms}
    found = read_shares(page)
    assert list(found) == list(shares)
    for name, values in shares.items():
        assert found[name] == pytest.approx(values, abs=1e-6)


def set_weight(page: Page, term: str, weight: float) -> None:
    page.get_by_label(f"Weight of {term}, as a number").fill(str(weight))


@pytest.mark.parametrize(
    ("given", "params", "words"),
    [
        (
            ("reward.combine=normalize_then_sum",),
            {"combine": "weighted_sum", "w__ocr": 0.7},
            ["reward.combine=weighted_sum", "reward.terms.ocr.weight=0.7"],
        ),
        (
            ("reward.terms.lpips.weight=0", "+reward.terms.lpips.when=evaluation"),
            {"w__lpips": 0.5, "w__ocr": 0.7},
            ["reward.terms.ocr.weight=0.7"],
        ),
    ],
)
def test_lines_to_copy_are_those_that_train_and_rescore_take(
    given: tuple[str, ...],
    params: dict[str, object],
    words: list[str],
    open_gallery: OpenGallery,
    gallery_run: RunFolder,
    configs_dir: Path,
    tmp_path: Path,
) -> None:
    folder = copy_run(gallery_run, tmp_path / "run")
    folder.config_path.write_text(make_config(configs_dir, *given))
    write_gallery(folder, ())
    page = open_gallery(fragment(**params), run=folder, allows=NOT_FOUND)
    lines, rescoring, training = (page.locator("pre").nth(place) for place in (0, 1, 2))
    for line in (rescoring, training):
        expect(line).to_contain_text("reward.terms.ocr")

    config = read_config(folder)
    changed = override_weighing(config, read_overrides(page))
    overrides = shlex.split(training.inner_text())[5:]
    assert {*words} <= {*overrides}
    trained = compose_config(folder.path, None, overrides)
    assert trained.reward.weights() == changed.reward.weights()
    assert trained.reward.combine == changed.reward.combine
    shown = yaml.safe_load(lines.inner_text())["reward"]
    assert shown["combine"] == changed.reward.combine
    of_evaluations = "+reward.terms.lpips.when=evaluation" in given
    slider = page.get_by_role("slider", name="lpips")
    expect(slider).to_be_disabled() if of_evaluations else expect(slider).to_be_enabled()


def test_weights_follow_the_slider_the_field_and_the_reset(
    open_gallery: OpenGallery, whole_run: RunFolder
) -> None:
    page = open_gallery("weights", run=whole_run, allows=NOT_FOUND)
    assert read_figure(page, "winners") == [0]
    assert read_figure(page, "tau") == [1]
    assert read_figure(page, "images") == [4 * 4 * 3]
    reset = page.get_by_role("button", name="Reset")
    expect(reset).to_be_disabled()
    slider = page.get_by_role("slider", name="ocr")
    slider.focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    assert_shows(page, whole_run, ["reward.terms.ocr.weight=0.3"])
    page.wait_for_url(re.compile(r"#weights\?w\.ocr=0\.3$"))
    set_weight(page, "ocr", -1.5)
    page.wait_for_url(re.compile(r"#weights\?w\.ocr=-1\.5$"))
    assert_shows(page, whole_run, ["reward.terms.ocr.weight=-1.5"])
    expect(slider).to_have_attribute("aria-valuetext", "-1.5, 0.25 in the run")
    page.get_by_label("normalize_then_sum").check()
    overrides = ["reward.terms.ocr.weight=-1.5", "reward.combine=normalize_then_sum"]
    assert_shows(page, whole_run, overrides)
    changed = rescore(whole_run, overrides).changed_winners
    expect(page.locator(".weights-summary [role=status]")).to_contain_text(
        f"{changed} of 16 groups change their winner."
    )
    reset.click()
    page.wait_for_url(re.compile(r"#weights$"))
    expect(reset).to_be_disabled()
    assert read_figure(page, "winners") == [0]


def test_weights_list_groups_by_what_changes_and_say_what_rescore_refuses(
    open_gallery: OpenGallery, whole_run: RunFolder
) -> None:
    # Totals of `plain`, 0.5 lpips + 0.25 ocr, rank samples 2, 0, 1; -0.5 lpips + 1 ocr gives
    # -0.5, 0.375 and 0: the order 1, 2, 0. `hostile` has lpips alone and turns round. `masked`
    # has ocr alone and `flat` is a zero-std group: both stay.
    page = open_gallery(fragment(w__lpips=-0.5, w__ocr=1), run=whole_run, allows=NOT_FOUND)
    assert read_figure(page, "images") == [4 * 4 * 3]
    expect(page.locator(".weights-group.is-changed")).to_have_count(8)
    plain = page.locator(".weights-group", has_text="Step 1, prompt plain")
    expect(plain).to_contain_text("winner changes: sample 2 to sample 1")
    expect(plain.locator(".weights-rank")).to_have_text(
        ["rank 1 (was 3)", "rank 2 (was 1)", "rank 3 (was 2)"]
    )
    # Of the three pairs of `plain` only 1-2 and 0-1 turn round: (1 - 2) / 3.
    expect(plain).to_contain_text("tau \u22120.333")
    # Eight groups of sixteen change; twelve are listed, those that stay as they are last, ten on a
    # page. The four zero-std ones are folded away.
    headings = page.locator(".weights-group h4")
    expect(headings).to_have_count(10)
    assert all("plain" in text or "script" in text for text in headings.all_inner_texts()[:8])
    page.get_by_role("button", name="Next").click()
    expect(headings).to_have_count(2)
    page.get_by_text("4 zero-std groups").click()
    expect(headings).to_have_count(2 + 4)
    page.get_by_label("only groups whose winner changes").check()
    expect(headings).to_have_count(8)
    page.get_by_label("only groups whose winner changes").uncheck()

    # With the run's own weights nothing changes: the widest spread comes first. That of `masked`
    # is 0.75 (0, 0.75, 0.375), that of `plain` 0.375.
    show(page, "weights")
    expect(headings.first).to_contain_text("masked")

    show(page, fragment(w__ocr=0))
    alert = page.get_by_role("alert")
    with pytest.raises(ConfigError) as refusal:
        rescore(whole_run, ["reward.terms.ocr.weight=0"])
    # The same rule in the same words, whatever stands around it; what is refused is not offered.
    rule = re.search(r"prompt masked has no total: .* such as \S+=0.1", str(refusal.value))
    assert rule is not None
    expect(alert).to_contain_text(rule[0])
    expect(page.locator("pre")).to_have_count(0)
    show(page, fragment(w__ocr="abc"))
    expect(alert).to_contain_text("reward.terms.ocr.weight = NaN")
    page.get_by_role("button", name="Reset").click()
    expect(alert).to_have_count(0)
    expect(page.locator("pre")).to_have_count(3)
    assert read_figure(page, "winners") == [0]


def test_terms_that_apply_to_no_sampled_prompt_have_no_slider(
    open_gallery: OpenGallery, whole_run: RunFolder, tmp_path: Path
) -> None:
    run = copy_run(whole_run, tmp_path / "run")

    def leave_out(data: Any) -> None:
        for step in data["steps"]:
            for group in step.get("groups", ()):
                group["raw"]["lpips"] = None

    for path in (run.gallery_path.parent / "data").glob("steps-*.js"):
        change_data(run, path.stem, leave_out)
    page = open_gallery("weights", run=run)
    expect(page.locator(".weights-term label")).to_have_text(["ocr"])
    expect(page.locator(".weights-sliders")).to_contain_text("apply to no sampled prompt: lpips.")
    expect(page.locator(".weights-sliders")).to_contain_text("With one term, no weight above 0")
