"""Galleries of made-up runs and a real one, opened from disk in a Chromium that is watched."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect, sync_playwright

from glm_grpo.config import compose_config, to_yaml
from glm_grpo.grpo.advantages import group_advantages
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.writing import append_metrics, encode, write_evaluation, write_rollout
from glm_grpo.studio.gallery import write_gallery
from glm_grpo.tiny.world import draw_sign, signs_of_words
from glm_grpo.types import Evaluation, Experience, ImageBatch, PromptBatch, Rollout
from rewards.types import Prompt, RewardTable
from rewards.weighting import combine
from tests.programs import Programs

HOSTILE = (
    "<script>document.title = 'taken over'</script><img src=x onerror=\"alert(1)\">"
    " \"'&amp; \u202eright to left\u202c 🙂"
)
LONG = "word " * 1000
SIDE = 64
GROUP_SIZE = 3
STEPS = (1, 2, 3, 12)
DAMAGED_STEP = 13
EVALUATIONS = (0, 6, 12)

# Axes: prompts plain, masked, flat and hostile; three samples; lpips and ocr. With weights of
# 0.5 and 0.25 the totals are, prompt by prompt:
#   plain    0.5 + 0.25 * 0 = 0.5   0.25 * 0.5 + 0.25 * 0.5 = 0.25   0.5 + 0.25 * 0.5 = 0.625
#   masked   only ocr, which takes over the weight of lpips: 0, 0.75 and 0.375
#   flat     0.25 + 0.125 = 0.375, three times
#   hostile  0.5, 0.375 and 0.25
RAW = torch.tensor(
    [
        [[1.0, 0.0], [0.25, 0.5], [1.0, 0.5]],
        [[0.0, 0.0], [0.0, 1.0], [0.0, 0.5]],
        [[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]],
        [[1.0, 0.0], [0.75, 0.0], [0.5, 0.0]],
    ]
)
NOTES = (("CXT", "", "CAT"), ("DOG", "XO", "DOG"), ("", "", ""), (HOSTILE, "", ""))

# Milliseconds. A test that waits longer waits in vain.
TIMEOUT = 10_000
expect.set_options(timeout=TIMEOUT)

# `gallery_run` lacks an image of step 3.
NOT_FOUND = "ERR_FILE_NOT_FOUND"

OpenGallery = Callable[..., Page]
FindViolations = Callable[[Page], list[str]]


def wait_until_loaded(page: Page) -> None:
    """Until the view has all its data and answers to keys.

    Heading and controls are there before the data, which come in files of their own. Later still
    come the images of Groups, the cells of Progress and the drawings of Curves, each once it is
    near the screen: who reads those at once has to wait for them.
    """
    page.wait_for_selector("main h1, main h2")
    loading = page.locator("main [role=status]", has_text=re.compile(r"^\s*Loading "))
    expect(loading).to_have_count(0)
    # Progress shows its first evaluation while the others load.
    expect(page.locator("main thead", has_text="loading")).to_have_count(0)
    # Preact runs the effects of a rendering, such as listening to keys, in a task after the next
    # frame, which it asked for before this does.
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")


def show(page: Page, fragment: str) -> None:
    """Another address in an open page, by which nothing is loaded again."""
    page.evaluate("(fragment) => { location.hash = fragment; }", fragment)
    view = fragment.partition("?")[0]
    page.wait_for_function("(view) => glmGallery.route().view === view", arg=view)
    # Two frames: one in which the page follows the address, one to draw.
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    wait_until_loaded(page)


def expect_cells(rows: Locator, texts: list[list[str]]) -> None:
    """What stands in the rows of a table."""
    expect(rows).to_have_count(len(texts))
    for index, row in enumerate(texts):
        expect(rows.nth(index).locator("th, td")).to_have_text(row, use_inner_text=True)


def copy_run(run: RunFolder, path: Path) -> RunFolder:
    """A run that a test may change."""
    shutil.copytree(run.path, path)
    return RunFolder(path)


def _prompts() -> tuple[Prompt, ...]:
    def target(value: int) -> torch.Tensor:
        return torch.full((3, SIDE, SIDE), value, dtype=torch.uint8)

    return (
        Prompt("plain", 'a sign with the word "CAT"', texts=("CAT",), target=target(80)),
        Prompt("masked", 'the word "DOG"', texts=("DOG",)),
        Prompt("flat", LONG, target=target(120)),
        Prompt(HOSTILE, HOSTILE, texts=(HOSTILE,), target=target(160)),
    )


def _table(raw: torch.Tensor) -> RewardTable:
    return RewardTable(
        names=("lpips", "ocr"),
        raw=raw,
        is_applicable=torch.tensor([[True, True], [False, True], [True, True], [True, True]]),
        weights=torch.tensor([0.5, 0.25]),
        std_floors=torch.tensor([1e-4, 1e-4]),
        notes={"ocr": NOTES},
    )


def _images() -> ImageBatch:
    """Every image of one colour, no two alike."""
    shades = torch.arange(12, dtype=torch.uint8).reshape(4, 3, 1, 1, 1) * 20
    pixels = shades.expand(4, GROUP_SIZE, 3, SIDE, SIDE).contiguous()
    return ImageBatch(pixels, decode_seeds=(2**63 - 1, 7, 8, 9))


def _experience(step: int) -> Experience:
    table, images = _table(RAW), _images()
    totals = combine(table, mode="weighted_sum")
    return Experience(
        prompts=PromptBatch(_prompts(), GROUP_SIZE, SIDE, SIDE, 0, images.decode_seeds),
        rollout=Rollout(
            token_ids=torch.zeros(4, GROUP_SIZE, 2, dtype=torch.int64),
            log_probs=torch.zeros(4, GROUP_SIZE, 2),
            sampling_mask=None,
        ),
        images=images,
        scores=table,
        totals=totals,
        penalties=torch.zeros(4, GROUP_SIZE),
        advantages=group_advantages(totals, normalization="group_std", std_floor=0.02, clip=5.0)[
            ..., None
        ],
    )


def _evaluation(step: int) -> Evaluation:
    """Two samples; at step 6 the totals of `plain` rise by 0.25, at step 12 by 0.125."""
    raw = RAW[:, :2].clone()
    raw[0, :, 1] += {0: 0.0, 6: 1.0, 12: 0.5}[step]
    table, images = _table(raw), _images()
    two = {"ocr": tuple(notes[:2] for notes in NOTES)}
    return Evaluation(
        step=step,
        prompts=_prompts(),
        images=ImageBatch(images.pixels[:, :2], images.decode_seeds),
        scores=RewardTable(
            table.names, raw, table.is_applicable, table.weights, table.std_floors, two
        ),
        totals=combine(table, mode="weighted_sum"),
        entropy=torch.ones(4),
    )


def make_config(configs_dir: Path, *others: str) -> str:
    """The config of the runs here, as it is stored, with other overrides."""
    overrides = [
        "~reward.terms.ssim",
        "~reward.terms.aesthetic",
        "reward.terms.lpips.weight=0.5",
        "reward.terms.ocr.weight=0.25",
        f"rollout.group_size={GROUP_SIZE}",
        "train.micro_batch_size=12",
        f"rollout.height={SIDE}",
        f"rollout.width={SIDE}",
        *others,
    ]
    return to_yaml(compose_config(configs_dir, "tiny", overrides))


def _metrics(step: int) -> Mapping[str, float]:
    return {"reward/mean": 0.25 + step / 100, "policy/entropy": 1.0 / (step + 1)}


def _record(path: Path, configs_dir: Path) -> RunFolder:
    """A run with two chunks of steps, whose last table a kill has cut off."""
    folder = RunFolder(path)
    path.mkdir(parents=True)
    folder.config_path.write_text(make_config(configs_dir), encoding="utf-8")
    for step in (0, *STEPS, DAMAGED_STEP):
        append_metrics(folder, step, _metrics(step))
    for step in (*STEPS, DAMAGED_STEP):
        experience = _experience(step)
        png_files = encode(experience.images)
        write_rollout(folder, experience, png_files, step, combine="weighted_sum")
    for step in EVALUATIONS:
        write_evaluation(folder, _evaluation(step), combine="weighted_sum")
    damaged = folder.rollout_path(DAMAGED_STEP)
    damaged.write_bytes(damaged.read_bytes()[:-9])
    (folder.image_dir(3) / "plain-1.png").unlink()
    return folder


def change_data(run: RunFolder, key: str, change: Callable[[Any], None]) -> None:
    """Changes what a data file hands over."""
    path = run.gallery_path.parent / "data" / f"{key}.js"
    call, separator, text = path.read_text(encoding="utf-8").partition(", ")
    data, end = json.JSONDecoder().raw_decode(text)
    change(data)
    path.write_text(call + separator + json.dumps(data) + text[end:], encoding="utf-8")


@pytest.fixture(scope="session")
def gallery_run(tmp_path_factory: pytest.TempPathFactory, configs_dir: Path) -> RunFolder:
    """A run and its gallery. Tests must not change it."""
    folder = _record(tmp_path_factory.mktemp("runs") / "run", configs_dir)
    write_gallery(folder, ())
    return folder


@pytest.fixture(scope="session")
def empty_run(tmp_path_factory: pytest.TempPathFactory, configs_dir: Path) -> RunFolder:
    """A run that has not made a step."""
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "empty")
    folder.path.mkdir()
    folder.config_path.write_text(make_config(configs_dir), encoding="utf-8")
    write_gallery(folder, ())
    return folder


@pytest.fixture(scope="session")
def real_run(
    tmp_path_factory: pytest.TempPathFactory, configs_dir: Path, programs: Programs
) -> RunFolder:
    """What train.py left of two steps on two edits, with two evaluations. Not to be changed."""
    folder = tmp_path_factory.mktemp("real")
    rows = []
    befores = signs_of_words(("KITE", "MENU"), seed=2)
    for before, word in zip(befores, ("OPEN", "SHOP"), strict=True):
        names = {"source": f"{before.word}.png", "target": f"{word}.png"}
        for name, sign in zip(names.values(), (before, replace(before, word=word)), strict=True):
            Image.fromarray(draw_sign(sign).permute(1, 2, 0).numpy()).save(folder / name)
        rows.append({"id": word, "prompt": f'write "{word}" instead', **names})
    data = folder / "edits.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    overrides = (
        *(f"data.path={data}", f"data.eval_path={data}", "data.sources=1"),
        *("train.steps=2", "train.eval_every=2", "trackers=[]", f"run_dir={folder / 'run'}"),
        *("rollout.prompts_per_step=2", "rollout.group_size=2", "train.micro_batch_size=4"),
        *("rollout.height=64", "rollout.width=64", "decode.steps=2", "eval.samples_per_prompt=1"),
    )
    ended = programs.run(folder, str(configs_dir.parent / "train.py"), *overrides)
    assert ended.returncode == 0, ended.stderr
    return RunFolder(folder / "run")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium: the one that `GLM_GRPO_CHROMIUM` names, or `chromium` on the path.

    As long as it is there, an event loop runs in this thread, and tests that run one of their own
    would fail. So the tests of this folder come last, see `tests/conftest.py`.
    """
    path = os.environ.get("GLM_GRPO_CHROMIUM") or shutil.which("chromium")
    if path is None:
        reason = "no Chromium: install `chromium`, or set GLM_GRPO_CHROMIUM to its path"
        if os.environ.get("GLM_GRPO_REQUIRE_BROWSER") == "1":
            pytest.fail(f"GLM_GRPO_REQUIRE_BROWSER=1, but {reason}")
        pytest.skip(reason)
    with sync_playwright() as playwright:
        # Containers run as root, which Chromium's sandbox refuses; only files of ours are opened.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_gallery(browser: Browser, gallery_run: RunFolder) -> Iterator[OpenGallery]:
    """Opens an address of a gallery and waits: `open_gallery(fragment, run=..., **context)`.

    `run` is a run folder (default: `gallery_run`), `allows` a text that console errors of this page
    may hold, `throws` that a script may fail, `context` what `Browser.new_context` takes. At the
    end the test fails where the page wrote an error to its console, threw one, or asked for
    anything outside the run's folder.
    """
    complaints: list[str] = []
    contexts: list[BrowserContext] = []

    def open_page(
        fragment: str = "",
        *,
        run: RunFolder = gallery_run,
        allows: str = "\0",
        throws: bool = False,
        **options: Any,
    ) -> Page:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(TIMEOUT)
        _watch(page, run.path, allows, complaints)
        if not throws:
            page.on("pageerror", lambda error: complaints.append(f"error: {error.stack}"))
        page.goto(f"{run.gallery_path.as_uri()}#{fragment}")
        wait_until_loaded(page)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def _watch(page: Page, folder: Path, allows: str, complaints: list[str]) -> None:
    def on_console(message: Any) -> None:
        if message.type == "error" and allows not in message.text:
            complaints.append(f"console: {message.text}")

    def on_request(request: Any) -> None:
        if not request.url.startswith((f"{folder.as_uri()}/", "data:")):
            complaints.append(f"request: {request.url}")

    page.on("console", on_console)
    page.on("request", on_request)


@pytest.fixture
def find_violations() -> FindViolations:
    """What axe-core has against a page: WCAG 2 A and AA, and best practice."""

    def find(page: Page) -> list[str]:
        # Its rules on style sheets would read files that are linked, which no page from disk may.
        violations = Axe().run(page, options={"preload": False}).response["violations"]
        return [
            f"{violation['id']}: {node['html'][:200]}"
            for violation in violations
            for node in violation["nodes"]
        ]

    return find
