"""Galleries of made-up runs and a real one, opened from disk in a Chromium that is watched."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from glm_grpo.config import compose_config, to_yaml
from glm_grpo.gallery import write_gallery
from glm_grpo.grpo.advantages import group_advantages
from glm_grpo.run.folder import RunFolder
from glm_grpo.tiny.world import HELD_OUT_WORDS, caption, draw_sign, signs_of_words
from glm_grpo.training.recording.recorder import Recorder
from glm_grpo.types import Evaluation, Experience, ImageBatch, PromptBatch, Rollout
from rewards.reweigh import Mode, combine
from rewards.types import Prompt, RewardTable

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
NOTES = (("CXT", "", "CAT"), ("DOG", "D0G", "DOG"), ("", "", ""), (HOSTILE, "", ""))

# Milliseconds. A test that waits longer waits in vain.
TIMEOUT = 10_000
expect.set_options(timeout=TIMEOUT)

OpenGallery = Callable[..., Page]


def wait_until_loaded(page: Page) -> None:
    """Until the view has all its data and answers to keys.

    Heading and controls are there before the data, which come in files of their own. Later still
    come the pictures of Groups, the cells of Progress and the drawings of Curves, each once it is
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
    """Every picture of one colour, no two alike."""
    shades = torch.arange(12, dtype=torch.uint8).reshape(4, 3, 1, 1, 1) * 20
    pixels = shades.expand(4, GROUP_SIZE, 3, SIDE, SIDE).contiguous()
    return ImageBatch(pixels, decode_seeds=(2**63 - 1, 7, 8, 9))


def _experience(step: int, mode: Mode) -> Experience:
    table, images = _table(RAW), _images()
    totals = combine(table, mode=mode)
    return Experience(
        prompts=PromptBatch(_prompts(), GROUP_SIZE, SIDE, SIDE, 0, images.decode_seeds),
        rollout=Rollout(
            token_ids=torch.zeros(4, GROUP_SIZE, 2, dtype=torch.int64),
            log_probs=torch.zeros(4, GROUP_SIZE, 2),
            sampling_mask=None,
            policy_step=step,
        ),
        images=images,
        rewards=table,
        totals=totals,
        penalties=torch.zeros(4, GROUP_SIZE),
        advantages=group_advantages(totals, normalization="group_std", std_floor=0.02, clip=5.0),
    )


def _evaluation(step: int, mode: Mode) -> Evaluation:
    """Two samples; at step 6 the totals of `plain` rise by 0.25, at step 12 by 0.125."""
    raw = RAW[:, :2].clone()
    raw[0, :, 1] += {0: 0.0, 6: 1.0, 12: 0.5}[step]
    table, images = _table(raw), _images()
    two = {"ocr": tuple(notes[:2] for notes in NOTES)}
    return Evaluation(
        step=step,
        prompts=_prompts(),
        images=ImageBatch(images.pixels[:, :2], images.decode_seeds),
        rewards=RewardTable(
            table.names, raw, table.is_applicable, table.weights, table.std_floors, two
        ),
        totals=combine(table, mode=mode),
        entropy=torch.ones(4),
    )


def _config(mode: Mode, configs_dir: Path) -> str:
    overrides = [
        f"reward.combine={mode}",
        "~reward.terms.ssim",
        "~reward.terms.aesthetic",
        "reward.terms.lpips.weight=0.5",
        "reward.terms.ocr.weight=0.25",
        f"rollout.group_size={GROUP_SIZE}",
        "train.micro_batch_size=12",
        f"rollout.height={SIDE}",
        f"rollout.width={SIDE}",
    ]
    return to_yaml(compose_config(configs_dir, "tiny", overrides))


def _metrics(step: int) -> Mapping[str, float]:
    return {"reward/mean": 0.25 + step / 100, "policy/entropy": 1.0 / (step + 1)}


def _record(path: Path, mode: Mode, configs_dir: Path) -> RunFolder:
    """A run with two chunks of steps, whose last table a kill has cut off."""
    folder = RunFolder(path)
    path.mkdir(parents=True)
    folder.config_path.write_text(_config(mode, configs_dir), encoding="utf-8")
    recorder = Recorder(folder, trackers=(), config={}, combine=mode)
    for step in (0, *STEPS, DAMAGED_STEP):
        recorder.record_step(step, _metrics(step))
    for step in (*STEPS, DAMAGED_STEP):
        recorder.record_rollout(_experience(step, mode), step)
    for step in EVALUATIONS:
        recorder.record_evaluation(_evaluation(step, mode))
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
def hostile() -> str:
    """The prompt of every run here, and its identifier, that would like to be more than text."""
    return HOSTILE


@pytest.fixture(scope="session")
def gallery_run(tmp_path_factory: pytest.TempPathFactory, configs_dir: Path) -> RunFolder:
    """A run with `weighted_sum`; its gallery is written. Tests must not change it."""
    folder = _record(tmp_path_factory.mktemp("runs") / "run", "weighted_sum", configs_dir)
    write_gallery(folder, ())
    return folder


@pytest.fixture(scope="session")
def standardised_run(tmp_path_factory: pytest.TempPathFactory, configs_dir: Path) -> RunFolder:
    """The same with `normalize_then_sum`."""
    folder = _record(tmp_path_factory.mktemp("runs") / "std", "normalize_then_sum", configs_dir)
    write_gallery(folder, ())
    return folder


@pytest.fixture(scope="session")
def empty_run(tmp_path_factory: pytest.TempPathFactory, configs_dir: Path) -> RunFolder:
    """A run that has not made a step."""
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "empty")
    folder.path.mkdir()
    folder.config_path.write_text(_config("weighted_sum", configs_dir), encoding="utf-8")
    write_gallery(folder, ())
    return folder


@pytest.fixture(scope="session")
def real_run(tmp_path_factory: pytest.TempPathFactory, configs_dir: Path) -> RunFolder:
    """What train.py left of three steps in float32 on the embedded model, with two evaluations.

    Of three held-out prompts one is markup and has no target. Tests must not change it.
    """
    folder = tmp_path_factory.mktemp("real")
    prompts: list[dict[str, str]] = []
    for sign in signs_of_words(HELD_OUT_WORDS[:2], seed=2):
        name = f"{sign.word.lower()}.png"
        Image.fromarray(draw_sign(sign).permute(1, 2, 0).numpy()).save(folder / name)
        prompts.append({"prompt": caption(sign), "target": name})
    prompts.append({"prompt": '<img src=x> red on white: a circle below the word "KITE"'})
    held_out = folder / "held_out.jsonl"
    held_out.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    overrides = (
        *("train.steps=3", "train.eval_every=3", "train.checkpoint_every=3", "trackers=[]"),
        *("rollout.prompts_per_step=2", "rollout.group_size=2", "train.micro_batch_size=4"),
        *(f"run_dir={folder / 'run'}", f"data.eval_path={held_out}"),
    )
    command = [sys.executable, str(configs_dir.parent / "train.py"), *overrides]
    ended = subprocess.run(
        command, cwd=configs_dir.parent, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return RunFolder(folder / "run")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium: the one that `GLM_GRPO_CHROMIUM` names, or `chromium` on the path.

    Ends with the file: as long as it is there, an event loop runs in this thread, and tests of
    other files that run one of their own would fail.
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
def find_violations() -> Callable[[Page], list[str]]:
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
