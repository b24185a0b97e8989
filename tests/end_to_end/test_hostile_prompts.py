"""Prompts, ids and notes that try to become markup, paths, commands or control of a terminal."""

from __future__ import annotations

import io
import json
import re
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from rich.console import Console

from glm_grpo.compare.comparison import ComparedRun, Comparison, Gain
from glm_grpo.compare.page import comparison_tables
from glm_grpo.config import compose_config, to_yaml
from glm_grpo.errors import DataError, StorageError
from glm_grpo.gallery import write_gallery
from glm_grpo.gallery.archive import write_archive
from glm_grpo.gallery.server import GalleryServer
from glm_grpo.grpo.advantages import group_advantages
from glm_grpo.output import printable
from glm_grpo.rescoring.page import print_rescoring, write_rescoring_sheet
from glm_grpo.rescoring.rescore import rescore
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_table
from glm_grpo.terminal import explain
from glm_grpo.training.data.entries import make_entry
from glm_grpo.training.data.files import read_rows
from glm_grpo.training.recording.recorder import Recorder
from glm_grpo.types import Evaluation, Experience, ImageBatch, PromptBatch, Rollout
from rewards.reweigh import combine
from rewards.types import Prompt, RewardError, RewardTable

HOSTILE = (
    "</script><script>touch()</script><img src=x onerror=touch()>",
    '"\'><a href=javascript:touch()> " onmouseover="touch()',
    "../../../pwned",
    "a..b",
    "/tmp/pwned",
    "$(touch pwned) `touch pwned` ; touch pwned | touch pwned && touch pwned\ntouch pwned",
    "{{ 7 * 7 }} {% include 'x' %} ${7*7} %(x)s {0}",
    "\x1b]0;pwned\x07 \x1b[31mred\x1b[0m \x1b]52;c;cHduZWQ=\x07 \r\x08\x7f\x9b31m",
    "\u202etxt.exe\u202c \u2028 \u2029 ]]> <!-- &lt;",
    "[bold red]loud[/] [link=file:///etc/passwd]here[/link]",
    "-rf --output=pwned",
    "-rf",
)
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
FILE_NAME = re.compile(r"\w[\w.-]*")
NAMES = ("lpips", "ssim", "ocr", "aesthetic")
SIZE = 2
OVERRIDES = ("train.steps=40", f"rollout.group_size={SIZE}")


def record(path: Path, configs_dir: Path) -> RunFolder:
    """A run whose prompts, ids, texts and notes are hostile; no term or tracker is asked."""
    folder, count = RunFolder(path), len(HOSTILE)
    path.mkdir(parents=True)
    config = to_yaml(compose_config(configs_dir, "tiny", OVERRIDES))
    folder.config_path.write_text(config, encoding="utf-8")
    target = torch.zeros(3, 8, 8, dtype=torch.uint8)
    prompts = tuple(Prompt(text, text, texts=(text,), target=target) for text in HOSTILE)
    # The first picture is nearer to its target; of the two that steer a terminal, the second one
    # is read better, so that a larger weight of ocr turns their order round: 0.8 * 0.3 < 0.4, and
    # 0.8 * 0.9 > 0.4.
    raw = torch.zeros(count, SIZE, 4)
    raw[:, 0, 0] = 1.0
    raw[[index for index, text in enumerate(HOSTILE) if "red" in text], 1, 2] = 0.8
    table = RewardTable(
        names=NAMES,
        raw=raw,
        is_applicable=torch.ones(count, 4, dtype=torch.bool),
        weights=torch.tensor([0.4, 0.2, 0.3, 0.1]),
        std_floors=torch.full((4,), 1e-4),
        notes={name: tuple((text,) * SIZE for text in HOSTILE) for name in NAMES},
    )
    seeds = tuple(range(count))
    pixels = torch.zeros(count, SIZE, 3, 8, 8, dtype=torch.uint8)
    images = ImageBatch(pixels, decode_seeds=seeds)
    totals = combine(table, mode="weighted_sum")
    recorder = Recorder(folder, trackers=(), config={}, combine="weighted_sum")
    for step in (0, 1):
        entropy = torch.ones(count)
        recorder.record_evaluation(Evaluation(step, prompts, images, table, totals, entropy))
    recorder.record_rollout(
        Experience(
            prompts=PromptBatch(prompts, SIZE, 32, 32, seed=0, decode_seeds=seeds),
            rollout=Rollout(
                token_ids=torch.zeros(count, SIZE, 3, dtype=torch.int64),
                log_probs=torch.zeros(count, SIZE, 3),
                sampling_mask=None,
                policy_step=0,
            ),
            images=images,
            rewards=table,
            totals=totals,
            penalties=torch.zeros(count, SIZE),
            advantages=group_advantages(
                totals, normalization="group_std", std_floor=0.02, clip=5.0
            ),
        ),
        1,
    )
    recorder.record_step(1, {"reward/mean": 0.5})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, configs_dir: Path) -> RunFolder:
    """The run, its gallery, its archive and its sheet; the only one in its parent folder."""
    folder = record(tmp_path_factory.mktemp("prompts") / "run", configs_dir)
    write_gallery(folder, ())
    write_archive(folder, folder.path / "run.zip")
    write_rescoring_sheet(folder, rescore(folder, ["reward.terms.ocr.weight=0.9"]))
    return folder


def test_prompts_are_stored_as_they_are(folder: RunFolder) -> None:
    stored = read_table(folder.rollout_path(1))
    assert stored["prompt"].to_pylist() == [text for text in HOSTILE for _ in range(SIZE)]


def test_ids_name_files_of_the_run_folder_and_of_no_other(folder: RunFolder) -> None:
    assert [path.name for path in folder.path.parent.iterdir()] == ["run"]
    files = [path for path in folder.path.rglob("*") if path.is_file()]
    assert len(list(folder.image_dir(1).iterdir())) == len(HOSTILE) * SIZE
    assert len(list(folder.targets_dir.iterdir())) == len(HOSTILE)
    for path in files:
        assert all(FILE_NAME.fullmatch(part) for part in path.relative_to(folder.path).parts), path
    assert not Path("/tmp/pwned").exists()


def test_archive_unpacks_into_one_folder(folder: RunFolder) -> None:
    with zipfile.ZipFile(folder.path / "run.zip") as archive:
        names = archive.namelist()
    assert sum(name.startswith("run/images/step-000001/") for name in names) == len(HOSTILE) * SIZE
    for name in names:
        first, *others = name.split("/")
        assert first == "run"
        assert all(FILE_NAME.fullmatch(part) for part in others), name


def test_archive_takes_nothing_along_that_a_link_leads_to(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.image_dir(1).mkdir(parents=True)
    (folder.image_dir(1) / "a-0.png").write_bytes(b"picture")
    folder.config_path.write_text("secret")
    (folder.image_dir(1) / "c-0.png").symlink_to(folder.config_path)
    write_archive(folder, tmp_path / "run.zip")
    with zipfile.ZipFile(tmp_path / "run.zip") as archive:
        assert archive.namelist() == ["run/images/step-000001/a-0.png"]
    (tmp_path / "key").write_bytes(b"secret")
    (folder.image_dir(1) / "b-0.png").symlink_to(tmp_path / "key")
    with pytest.raises(StorageError, match=r"b-0\.png is a link that leads out of the run folder"):
        write_archive(folder, tmp_path / "other.zip")
    assert not (tmp_path / "other.zip").exists()


def test_data_files_of_the_gallery_are_one_call_with_json(folder: RunFolder) -> None:
    shown = []
    for path in sorted((folder.gallery_path.parent / "data").glob("*.js")):
        text = path.read_text(encoding="utf-8")
        assert "<" not in text
        assert len(text.splitlines()) == 1
        match = re.fullmatch(r'glmGallery\.receive\("[\w-]+", (\{.*\})\);\n', text)
        data = json.loads(match[1])
        for step in data.get("steps", [data]):
            shown += [group["prompt"] for group in step.get("groups", [])]
    assert set(shown) == set(HOSTILE)


class Elements(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_of_before_and_after_shows_prompts_as_text(folder: RunFolder) -> None:
    page = Elements(folder.gallery_path.with_name("report.html"))
    shown = [text for text in HOSTILE if text in page.text]
    assert shown, "the page shows none of the prompts"
    assert "49 " not in page.text  # what the template in a prompt would give
    assert {tag for tag, _ in page.found}.isdisjoint({"script", "iframe", "object", "form", "base"})
    for _, attributes in page.found:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("href", "src"):
            address = attributes.get(name) or ""
            assert not re.match(r"\s*(javascript:|https?:|//|/)", address), address


def test_server_of_the_gallery_serves_no_address_that_climbs_out(folder: RunFolder) -> None:
    with GalleryServer(folder, 0) as server:
        assert server.server_address[0] == "127.0.0.1"
        page = server.open("/gallery/index.html")
        assert page is not None
        with page:
            assert page.read() == folder.gallery_path.read_bytes()
        for address in (
            "/config.yaml",
            "/gallery/../config.yaml",
            "/gallery/%2e%2e/config.yaml",
            "/images/..%2f..%2fconfig.yaml",
            "/images//etc/passwd",
            "/images/%00",
            "//etc/passwd",
            f"/images/{HOSTILE[2]}",
        ):
            assert server.open(address) is None, address


def test_rescore_prints_prompts_without_what_steers_a_terminal(folder: RunFolder) -> None:
    for is_terminal in (False, True):
        output = io.StringIO()
        console = Console(file=output, force_terminal=is_terminal, color_system=None, width=20_000)
        print_rescoring(console, folder, rescore(folder, ["reward.terms.ocr.weight=0.9"]))
        printed = output.getvalue()
        # rich's own bold and italics of headings, on a terminal.
        own = re.sub(r"\x1b\[\d*m", "", printed) if is_terminal else printed
        assert STEERING.search(own) is None
        assert "\\x1b]0;pwned" in own
        assert "\x1b[31m" not in printed
        assert "[bold red]loud[/]" in own


@pytest.mark.parametrize("text", HOSTILE)
def test_compare_prints_names_and_settings_without_what_steers_a_terminal(text: str) -> None:
    run = ComparedRun(
        name=text,
        settings={text: text},
        steps=(0, 1),
        totals=(0.25, 0.5),
        gain=Gain(0.25, 0.125, 0.375),
        over_first=None,
        terms={text: 0.5},
    )
    comparison = Comparison(
        weights={text: 1.0},
        prompts=1,
        samples_per_prompt=1,
        runs=(run,),
        untrained={text: 0.25},
        trade_offs=(),
        left_out=(text,),
        side_by_side=(),
    )
    console = Console(file=io.StringIO(), color_system=None, width=2_000)
    settings, totals, terms = comparison_tables(comparison)
    for table in (settings, totals, terms):
        console.print(table)
    assert STEERING.search(console.file.getvalue()) is None
    assert settings.row_count == totals.row_count == 1
    assert str(terms.columns[1].header) == printable(text)


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("error", [RewardError, DataError])
def test_errors_that_quote_a_prompt_steer_no_terminal(text: str, error: type[Exception]) -> None:
    line = explain(error(f"the scorer failed: {text}"))
    assert STEERING.search(line) is None
    assert line.startswith(f"{error.__name__}: the scorer failed: ")


@pytest.mark.parametrize(
    "prompt_id",
    ["../../pwned", "/tmp/pwned", "a/b", "a\\b", ".hidden", "a\0b", "\x1b[31m", "a\nb", "x" * 101],
)
def test_ids_of_a_prompts_file_that_are_no_names_are_refused(
    tmp_path: Path, prompt_id: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "a dog", "id": prompt_id}))
    with pytest.raises(DataError, match="'?id'?") as caught:
        [make_entry(row, 0) for row in read_rows(str(file))]
    assert STEERING.search(explain(caught.value)) is None


@pytest.mark.parametrize("text", ["a\0b", "a \ud800 b"])
def test_prompts_that_no_file_can_hold_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": text}))
    with pytest.raises(DataError, match="null character"):
        [make_entry(row, 0) for row in read_rows(str(file))]


@pytest.mark.parametrize("target", ["../secret.png", "/etc/secret.png", "a/../../secret.png"])
def test_targets_outside_the_folder_of_the_prompts_are_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "a dog", "target": target}))
    with pytest.raises(DataError, match="outside"):
        [make_entry(row, 0) for row in read_rows(str(file))]
