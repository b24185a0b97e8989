"""The Weights view: its figures are those of `glm-grpo rescore`, and it says what it shows."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlencode

import pytest
import torch
import yaml
from playwright.sync_api import Page, expect

from glm_grpo.config import Config, compose_config, to_yaml
from glm_grpo.errors import ConfigError
from glm_grpo.gallery import write_gallery
from glm_grpo.grpo.advantages import group_advantages
from glm_grpo.rescoring.rescore import override_weighing, rescore
from glm_grpo.run.config import read_config
from glm_grpo.run.folder import RunFolder
from glm_grpo.training.recording.recorder import Recorder
from glm_grpo.types import Experience, ImageBatch, PromptBatch, Rollout
from rewards.audit.shares import SHARE_TOLERANCE
from rewards.reweigh import combine
from rewards.types import Prompt, RewardTable
from tests.browser.conftest import HOSTILE, OpenGallery

# `gallery_run` lacks a picture.
MISSING = "ERR_FILE_NOT_FOUND"
FindViolations = Callable[[Page], list[str]]

PROMPTS, IMAGES, STEPS = 5, 6, 4
SUM_RUN = ("advantage.clip=1.2",)
STANDARDISED_RUN = ("reward.combine=normalize_then_sum", "advantage.normalization=batch_std")


def make_experience(config: Config, step: int) -> Experience:
    """Random scores with masks, ties, a flat group and penalties; aesthetic always applies."""
    generator = torch.Generator().manual_seed(step)
    raw = torch.rand(PROMPTS, IMAGES, 4, generator=generator)
    raw[0] = raw[0, :1]
    raw[1, :2] = raw[1, 2:3]
    is_applicable = torch.rand(PROMPTS, 4, generator=generator) < 0.7
    is_applicable[:, 3] = True
    is_applicable[4] = torch.tensor([False, False, False, True])
    terms = config.reward.terms
    table = RewardTable(
        names=tuple(terms),
        raw=raw * is_applicable[:, None, :],
        is_applicable=is_applicable,
        weights=torch.tensor([term.weight for term in terms.values()]),
        std_floors=torch.tensor([term.std_floor for term in terms.values()]),
    )
    totals = combine(table, mode=config.reward.combine)
    penalties = 0.1 * torch.randn(PROMPTS, IMAGES, generator=generator)
    prompts = tuple(Prompt(f"p{row}", HOSTILE) for row in range(PROMPTS))
    seeds = tuple(range(PROMPTS))
    pixels = torch.full((PROMPTS, IMAGES, 3, 32, 32), 20 * step, dtype=torch.uint8)
    return Experience(
        prompts=PromptBatch(prompts, IMAGES, 32, 32, seed=0, decode_seeds=seeds),
        rollout=Rollout(
            token_ids=torch.zeros(PROMPTS, IMAGES, 2, dtype=torch.int64),
            log_probs=torch.zeros(PROMPTS, IMAGES, 2),
            sampling_mask=None,
            policy_step=step,
        ),
        images=ImageBatch(pixels, seeds),
        rewards=table,
        totals=totals,
        penalties=penalties,
        advantages=group_advantages(
            totals - penalties,
            normalization=config.advantage.normalization,
            std_floor=config.advantage.std_floor,
            clip=config.advantage.clip,
        ),
    )


def write_run(path: Path, configs_dir: Path, *overrides: str) -> RunFolder:
    sizes = (f"rollout.prompts_per_step={PROMPTS}", f"rollout.group_size={IMAGES}")
    micro = f"train.micro_batch_size={PROMPTS * IMAGES}"
    config = compose_config(
        configs_dir, "tiny", [*sizes, micro, "rollout.height=32", "rollout.width=32", *overrides]
    )
    folder = RunFolder(path)
    path.mkdir(parents=True)
    folder.config_path.write_text(to_yaml(config), encoding="utf-8")
    recorder = Recorder(folder, trackers=(), config={}, combine=config.reward.combine)
    for step in range(1, STEPS + 1):
        recorder.record_rollout(make_experience(config, step), step)
    write_gallery(folder, ())
    return folder


@pytest.fixture(scope="module")
def sum_run(tmp_path_factory: pytest.TempPathFactory, configs_dir: Path) -> RunFolder:
    """A run with `weighted_sum` and the weights of configs/tiny.yaml. Not to be changed."""
    return write_run(tmp_path_factory.mktemp("runs") / "sum", configs_dir, *SUM_RUN)


@pytest.fixture(scope="module")
def standardised_scores_run(
    tmp_path_factory: pytest.TempPathFactory, configs_dir: Path
) -> RunFolder:
    """The same with `normalize_then_sum` and advantages over the batch. Not to be changed."""
    return write_run(tmp_path_factory.mktemp("runs") / "std", configs_dir, *STANDARDISED_RUN)


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
    assert read_figure(page, "flat") == [expected.flat_before, expected.flat_after]
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
    "params",
    [
        {"w__ocr": 0.9},
        {"w__ocr": -0.3, "w__lpips": 1e-7},
        {"w__lpips": 0, "w__ssim": 0, "w__aesthetic": 2.5},
        {"combine": "normalize_then_sum"},
        {"combine": "normalize_then_sum", "w__ssim": -0.25, "w__aesthetic": 0.7},
        {"combine": "weighted_sum", "w__lpips": 0.123456789},
    ],
)
@pytest.mark.parametrize("run", ["sum_run", "standardised_scores_run"])
def test_weights_show_what_rescore_computes(
    run: str,
    params: dict[str, object],
    open_gallery: OpenGallery,
    request: pytest.FixtureRequest,
) -> None:
    folder: RunFolder = request.getfixturevalue(run)
    page = open_gallery(fragment(**params), run=folder)
    # The command that the page shows is the one that gives its figures.
    assert_shows(page, folder, read_overrides(page))


def test_weights_give_the_advantages_of_rescore(
    open_gallery: OpenGallery, sum_run: RunFolder
) -> None:
    page = open_gallery(fragment(w__ocr=-0.5), run=sum_run)
    found = page.evaluate(
        """async () => {
          const { run, scoring } = glmGallery;
          const steps = await glmGallery.loadSteps();
          const terms = run.reward.terms.map((term) => (
            term.name === "ocr" ? { ...term, weight: -0.5 } : term));
          const after = { ...run.reward, terms };
          const { perGroup } = scoring.compare(steps, run.reward, after, run.advantage);
          return Object.fromEntries(perGroup.flatMap((group) => (
            group.group.images.map((image, sample) => [`images/${image}`,
              [group.advantagesBefore[sample], group.advantagesAfter[sample]]]))));
        }"""
    )
    rescoring = rescore(sum_run, ["reward.terms.ocr.weight=-0.5"])
    assert len(rescoring.gaining) == len(rescoring.losing) == 8
    for image in (*rescoring.gaining, *rescoring.losing):
        expected = [image.advantage_before, image.advantage_after]
        assert found[image.image] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("given", "params", "words"),
    [
        (
            ("reward.combine=shares", "+reward.terms.ocr.share=0.6"),
            {"combine": "weighted_sum", "w__ocr": 0.7},
            ["reward.terms.ocr.share=null", "reward.terms.ocr.weight=0.7"],
        ),
        (
            ("reward.combine=shares", "+reward.terms.ocr.share=0.6"),
            {"w__ocr": 0.7},
            ["reward.terms.ocr.share=0.7"],
        ),
        (
            ("reward.watch=[ssim]", "reward.terms.ssim.weight=0"),
            {"w__ssim": 0.5, "w__ocr": 0.7},
            ["reward.watch=[]", "reward.terms.ssim.weight=0.5"],
        ),
        (
            ("reward.terms.ssim.weight=0", "+reward.terms.ssim.when=evaluation"),
            {"w__ssim": 0.5, "w__ocr": 0.7},
            ["reward.terms.ocr.weight=0.7"],
        ),
    ],
)
def test_lines_to_copy_are_those_that_train_and_rescore_take(
    given: tuple[str, ...],
    params: dict[str, object],
    words: list[str],
    open_gallery: OpenGallery,
    configs_dir: Path,
    tmp_path: Path,
) -> None:
    folder = write_run(tmp_path / "run", configs_dir, *given)
    page = open_gallery(fragment(**params), run=folder)
    rescoring, training = (page.locator("pre").nth(place) for place in (1, 2))
    for line in (rescoring, training):
        expect(line).to_contain_text("reward.terms.ocr")

    config = read_config(folder)
    changed = override_weighing(config, read_overrides(page))
    overrides = shlex.split(training.inner_text())[5:]
    assert {*words} <= {*overrides}
    trained = compose_config(folder.path, None, overrides)
    assert trained.reward.weights() == changed.reward.weights()
    assert trained.reward.combine == changed.reward.combine
    of_evaluations = "+reward.terms.ssim.when=evaluation" in given
    slider = page.get_by_role("slider", name="ssim")
    expect(slider).to_be_disabled() if of_evaluations else expect(slider).to_be_enabled()


def test_weights_follow_the_slider_the_field_and_the_reset(
    open_gallery: OpenGallery, sum_run: RunFolder
) -> None:
    page = open_gallery("weights", run=sum_run)
    assert read_figure(page, "winners") == [0]
    assert read_figure(page, "tau") == [1]
    reset = page.get_by_role("button", name="Reset")
    expect(reset).to_be_disabled()
    slider = page.get_by_role("slider", name="ocr")
    slider.focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    assert_shows(page, sum_run, ["reward.terms.ocr.weight=0.35"])
    page.wait_for_url(re.compile(r"#weights\?w\.ocr=0\.35$"))
    set_weight(page, "ocr", -1.5)
    page.wait_for_url(re.compile(r"#weights\?w\.ocr=-1\.5$"))
    assert_shows(page, sum_run, ["reward.terms.ocr.weight=-1.5"])
    expect(slider).to_have_attribute("aria-valuetext", "-1.5, 0.3 in the run")
    page.get_by_label("normalize_then_sum").check()
    overrides = ["reward.terms.ocr.weight=-1.5", "reward.combine=normalize_then_sum"]
    assert_shows(page, sum_run, overrides)
    reset.click()
    page.wait_for_url(re.compile(r"#weights$"))
    expect(reset).to_be_disabled()
    assert read_figure(page, "winners") == [0]


def test_weights_keep_a_half_typed_number(open_gallery: OpenGallery, sum_run: RunFolder) -> None:
    page = open_gallery(fragment(w__ocr=0.5), run=sum_run)
    field = page.get_by_label("Weight of ocr, as a number")
    field.click()
    page.keyboard.press("Control+a")
    page.keyboard.press("Delete")
    expect(field).to_have_value("")
    # An empty field is no weight: the last one holds.
    assert_shows(page, sum_run, ["reward.terms.ocr.weight=0.5"])
    page.keyboard.type("0.75")
    expect(field).to_have_value("0.75")
    assert_shows(page, sum_run, ["reward.terms.ocr.weight=0.75"])
    page.keyboard.press("Control+a")
    page.keyboard.press("Delete")
    page.keyboard.press("Tab")
    expect(field).to_have_value("0.75")


def test_weights_yaml_is_what_a_config_takes(
    open_gallery: OpenGallery, sum_run: RunFolder, configs_dir: Path
) -> None:
    page = open_gallery(
        fragment(combine="normalize_then_sum", w__ocr=1e-7, w__ssim=-2), run=sum_run
    )
    shown = yaml.safe_load(page.locator("pre").first.inner_text())
    assert shown == {
        "reward": {
            "combine": "normalize_then_sum",
            "terms": {
                "lpips": {"weight": 0.4},
                "ssim": {"weight": -2},
                "ocr": {"weight": 1e-7},
                "aesthetic": {"weight": 0.1},
            },
        }
    }
    overrides = [
        f"reward.terms.{name}.weight={term['weight']}"
        for name, term in shown["reward"]["terms"].items()
    ]
    config = compose_config(configs_dir, "tiny", overrides)
    assert config.reward.weights() == {"lpips": 0.4, "ssim": -2, "ocr": 1e-7, "aesthetic": 0.1}


def test_weights_give_a_training_command_that_a_config_takes(
    open_gallery: OpenGallery, sum_run: RunFolder, tmp_path: Path
) -> None:
    page = open_gallery(fragment(combine="normalize_then_sum", w__ssim=-2), run=sum_run)
    words = shlex.split(page.locator("pre").nth(2).inner_text())
    assert words[:4] == ["glm-grpo", "train", "--config-dir", "RUN"]
    # The config of a run is one to train with.
    folder = Path(shutil.copy(sum_run.config_path, tmp_path)).parent
    config = compose_config(folder, "config", words[4:])
    assert config.run_dir == "NEW"
    assert config.reward.combine == "normalize_then_sum"
    assert config.reward.weights() == {"lpips": 0.4, "ssim": -2, "ocr": 0.3, "aesthetic": 0.1}


def test_weights_follow_from_the_shares_asked_for(
    open_gallery: OpenGallery, sum_run: RunFolder
) -> None:
    page = open_gallery("weights", run=sum_run)
    measured = {name: now for name, (_, now) in read_shares(page).items()}
    page.get_by_label("set shares, get weights").check()
    slider = page.get_by_role("slider", name="ocr")
    expect(slider).to_have_attribute("aria-valuetext", re.compile(r"^share \d+\.\d %, weight 0\."))
    slider.fill("0.4")
    page.wait_for_url(re.compile(r"by=shares.*s\.ocr=0\.4"))
    # The others keep their proportion.
    rest = 1 - measured["ocr"]
    wanted = {name: 0.6 * share / rest for name, share in measured.items()} | {"ocr": 0.4}
    expect(page.locator(".weights-results [role=alert]")).to_have_count(0)
    overrides = read_overrides(page)
    reached = {term.name: term.share_after for term in rescore(sum_run, overrides).terms}
    # As near as `probe --share` comes: groups of six images leave no weights that give them all.
    assert reached == pytest.approx(wanted, abs=SHARE_TOLERANCE)
    assert_shows(page, sum_run, overrides)
    # Back to weights: those found stay.
    page.get_by_label("set weights").check()
    page.wait_for_url(re.compile(r"#weights\?(?!.*s\.ocr).*w\.ocr="))
    assert read_overrides(page) == overrides


def test_weights_say_which_shares_cannot_be_had(
    open_gallery: OpenGallery, gallery_run: RunFolder
) -> None:
    # Of the three groups that are not flat `hostile` varies in lpips alone, `masked` in ocr alone.
    page = open_gallery(
        fragment(by="shares", s__lpips=0.95, s__ocr=0.05), run=gallery_run, allows=MISSING
    )
    said = page.locator(".weights-results [role=alert]")
    expect(said).to_contain_text("no weights were found that give these shares; the nearest give")


def test_weights_sliders_stay_in_sight_and_reach_further(
    open_gallery: OpenGallery, sum_run: RunFolder
) -> None:
    for width in (1280, 390):
        page = open_gallery("weights", run=sum_run, viewport={"width": width, "height": 844})
        slider = page.get_by_role("slider", name="lpips")
        expect(slider).to_have_attribute("max", "1")
        page.get_by_label("sliders reach").select_option("5")
        expect(slider).to_have_attribute("max", "5")
        slider.fill("3.5")
        page.wait_for_url(re.compile(r"w\.lpips=3\.5"))
        page.locator(".weights-group").last.scroll_into_view_if_needed()
        expect(slider).to_be_in_viewport()


def test_weights_select_the_text_where_the_clipboard_is_refused(
    open_gallery: OpenGallery, sum_run: RunFolder
) -> None:
    page = open_gallery(fragment(w__ocr=0.5), run=sum_run)
    page.locator("pre").first.wait_for()
    page.evaluate(
        "() => { navigator.clipboard.writeText = () => Promise.reject(new Error('refused')); }"
    )
    page.get_by_role("button", name="Copy command").click()
    expect(page.get_by_text("Selected; press Ctrl+C")).to_be_visible()
    selected = page.evaluate("getSelection().toString()")
    assert selected == "glm-grpo rescore RUN reward.terms.ocr.weight=0.5"


def test_weights_copy_where_the_clipboard_is_granted(
    open_gallery: OpenGallery, sum_run: RunFolder
) -> None:
    page = open_gallery(
        fragment(w__ocr=0.5), run=sum_run, permissions=["clipboard-read", "clipboard-write"]
    )
    page.get_by_role("button", name="Copy YAML").click()
    expect(page.get_by_text("Copied.")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == page.evaluate(
        "document.querySelector('pre').textContent"
    )


def test_weights_list_groups_by_what_changes_in_their_new_order(
    open_gallery: OpenGallery, gallery_run: RunFolder
) -> None:
    # Totals of `plain`, 0.5 lpips + 0.25 ocr, rank samples 2, 0, 1; -0.5 lpips + 1 ocr gives
    # -0.5, 0.375 and 0: the order 1, 2, 0. `hostile` has lpips alone and turns round. `masked`
    # has ocr alone and `flat` is flat: both stay.
    page = open_gallery(fragment(w__lpips=-0.5, w__ocr=1), run=gallery_run, allows=MISSING)
    winners = page.locator(".weights-group.is-changed")
    expect(winners).to_have_count(8)
    plain = page.locator(".weights-group", has_text="Step 1, prompt plain")
    expect(plain).to_contain_text("winner changes: sample 2 to sample 1")
    expect(plain.locator(".weights-rank")).to_have_text(["1 (was 3)", "2 (was 1)", "3 (was 2)"])
    pair = plain.locator(".weights-pair figcaption")
    expect(pair.nth(0)).to_contain_text(re.compile(r"was best sample 2\s*asked CAT, read CAT"))
    expect(pair.nth(1)).to_contain_text(re.compile(r"is best sample 1\s*asked CAT, read nothing"))
    pictures = plain.locator(".weights-samples img")
    for index, sample in enumerate((1, 2, 0)):
        name = f"step 1, prompt plain, sample {sample}"
        expect(pictures.nth(index)).to_have_attribute("alt", name)
    # Of the three pairs of `plain` only 1-2 and 0-1 turn round: (1 - 2) / 3.
    expect(plain).to_contain_text("tau \u22120.333")
    flat = page.locator(".weights-group", has_text="Step 1, prompt flat")
    expect(flat.locator(".is-best")).to_have_count(0)
    # Eight groups of sixteen change; twelve fit on a page.
    expect(page.locator(".weights-group h4")).to_have_count(12)
    headings = page.locator(".weights-group h4").all_inner_texts()
    assert all("plain" in text or "script" in text for text in headings[:8])
    # Groups that stay as they are come last.
    page.get_by_role("button", name="Next").click()
    last = page.locator(".weights-group h4")
    expect(last).to_have_count(4)
    assert all("flat" in text or "masked" in text for text in last.all_inner_texts())
    page.get_by_label("only groups whose winner changes").check()
    expect(page.locator(".weights-group")).to_have_count(8)


def test_weights_give_equal_totals_one_rank(
    open_gallery: OpenGallery, gallery_run: RunFolder
) -> None:
    # Of `plain`: -1 * (1, 0.25, 1) - 1.5 * (0, 0.5, 0.5) = (-1, -1, -1.75); it was 2, 0, 1.
    page = open_gallery(fragment(w__lpips=-1, w__ocr=-1.5), run=gallery_run, allows=MISSING)
    plain = page.locator(".weights-group", has_text="Step 1, prompt plain")
    expect(plain).to_contain_text("winner changes: sample 2 to samples 0, 1")
    expect(plain.locator(".weights-rank")).to_have_text(["1 (was 2)", "1 (was 3)", "3 (was 1)"])
    expect(plain.locator(".is-best")).to_have_count(2)


def test_weights_turn_pages_in_the_address(
    open_gallery: OpenGallery, gallery_run: RunFolder
) -> None:
    page = open_gallery(fragment(w__lpips=-0.5, sort="step"), run=gallery_run, allows=MISSING)
    expect(page.locator(".weights-group").first).to_contain_text("Step 1,")
    page.get_by_role("button", name="Next", exact=True).click()
    expect(page.get_by_text("Page 2 of 2")).to_be_visible()
    expect(page.locator(".weights-group")).to_have_count(4)
    page.wait_for_url(re.compile("page=2"))
    page.reload()
    expect(page.get_by_text("Page 2 of 2")).to_be_visible()
    # Other weights, another list: it starts at its first page.
    set_weight(page, "ocr", 2)
    expect(page.get_by_text("Page 1 of 2")).to_be_visible()


@pytest.mark.parametrize(
    "params",
    [
        {"w__lpips": 0, "w__ssim": 0, "w__ocr": 0, "w__aesthetic": 0},
        {"w__aesthetic": 0},
        {"w__ocr": "1e39"},
    ],
)
def test_weights_say_in_place_what_rescore_refuses(
    params: dict[str, object], open_gallery: OpenGallery, sum_run: RunFolder
) -> None:
    page = open_gallery(fragment(**params), run=sum_run)
    alert = page.get_by_role("alert")
    expect(alert).to_be_visible()
    with pytest.raises(ConfigError) as refusal:
        rescore(sum_run, [f"reward.terms.{name[3:]}.weight={params[name]}" for name in params])
    # What is refused is not offered.
    expect(page.locator("pre")).to_have_count(0)
    # The same rule in the same words, whatever stands around it.
    said = alert.inner_text()
    rule = re.search(
        r"the weights of all terms \(.*?\) are 0, so every reward is 0"
        r"|prompt p\d has no total: of the terms that apply to it \(aesthetic\) none has a weight "
        r"other than 0; set one, such as reward.terms.aesthetic.weight=0.1"
        r"|must be 0, or 1e-30 to 1e\+12 in size: float32 holds no other",
        str(refusal.value),
    )
    assert rule is not None
    assert rule[0] in said
    # The way out is there: nothing but the results is gone.
    page.get_by_role("button", name="Reset").click()
    expect(alert).to_have_count(0)
    expect(page.locator("pre")).to_have_count(3)
    assert read_figure(page, "winners") == [0]


def test_weights_refuse_what_is_no_number(open_gallery: OpenGallery, sum_run: RunFolder) -> None:
    page = open_gallery(fragment(w__ocr="abc"), run=sum_run)
    expect(page.get_by_role("alert")).to_contain_text(
        "reward.terms.ocr.weight = NaN: must be a finite number; 0 leaves the term out"
    )


def test_weights_say_which_steps_could_not_be_read(
    open_gallery: OpenGallery, gallery_run: RunFolder
) -> None:
    page = open_gallery("weights", run=gallery_run, allows=MISSING)
    expect(page.locator("main .problem")).to_contain_text(
        "Step 13 is left out: rollouts/step-000013.parquet is not a whole Parquet file"
    )
    assert read_figure(page, "images") == [4 * 4 * 3]


def test_weights_say_that_a_run_has_no_step_yet(
    open_gallery: OpenGallery, empty_run: RunFolder
) -> None:
    page = open_gallery("weights", run=empty_run)
    expect(page.locator("main")).to_contain_text("the run has not stored a training step yet")


def test_weights_do_without_the_advantages_of_a_config_that_cannot_be_read(
    open_gallery: OpenGallery, sum_run: RunFolder, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(sum_run.path, folder.path)
    folder.config_path.write_text("reward: [", encoding="utf-8")
    write_gallery(folder, ())
    page = open_gallery(fragment(w__ocr=0.9), run=folder)
    # Weights and scores stand in the tables too.
    assert_shows(page, sum_run, ["reward.terms.ocr.weight=0.9"])
    expect(page.get_by_label("Sorted by")).to_have_value("winner")
    expect(page.locator(".weights-samples li").first).to_have_text(
        re.compile(r"^1( \(was \d\))?total \d\.\d{3}$")
    )


def test_weights_tell_a_screen_reader_once_the_slider_rests(
    open_gallery: OpenGallery, sum_run: RunFolder
) -> None:
    page = open_gallery(fragment(w__ocr=0.9), run=sum_run)
    changed = rescore(sum_run, ["reward.terms.ocr.weight=0.9"]).changed_winners
    expect(page.locator(".weights-summary [role=status]")).to_contain_text(
        f"{changed} of 20 groups change their winner."
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_weights_are_accessible_at_any_width_in_both_schemes(
    width: int,
    scheme: str,
    open_gallery: OpenGallery,
    sum_run: RunFolder,
    find_violations: FindViolations,
) -> None:
    page = open_gallery(
        fragment(w__ocr=0.9, w__lpips=-0.2),
        run=sum_run,
        viewport={"width": width, "height": 800},
        color_scheme=scheme,
    )
    page.locator(".weights-group").first.wait_for()
    assert find_violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
