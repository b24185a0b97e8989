"""Every file of a run's folder damaged in every way: each reader works, or names the file.

The damages are generated from a real run. `GLM_GRPO_SWEEP` says which of them are tried: a number,
or a pattern of `file: damage` (`.` for all); the default is a sample that is always the same.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from accelerate import Accelerator
from PIL import Image
from rich.console import Console

from glm_grpo import cli
from glm_grpo.builders.models import build_models
from glm_grpo.builders.prompts import build_prompts
from glm_grpo.builders.trainer import Launch, build_trainer
from glm_grpo.config import Config, compose_config
from glm_grpo.errors import GlmGrpoError
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import METADATA_KEY, read_run_ids
from glm_grpo.training.checkpoint.resume import find_checkpoint, open_run
from glm_grpo.training.distributed.processes import Processes
from rewards.types import RewardError

CONFIGS = Path(__file__).parents[2] / "configs"
DEFAULT_TRIED = "40"
PATIENCE = 60.0
"""Seconds for one reader; about one is usual."""

SETTINGS = (
    *(
        "train.steps=2",
        "train.eval_every=2",
        "train.checkpoint_every=1",
        "train.keep_checkpoints=1",
    ),
    *("rollout.prompts_per_step=1", "rollout.group_size=2", "eval.samples_per_prompt=1"),
    *("rollout.height=64", "rollout.width=64", "decode.steps=1", "train.micro_batch_size=2"),
    *("reward.terms.lpips=null", "reward.terms.ocr=null", "reward.terms.aesthetic=null"),
    *("train.resume=auto", "optim.warmup_steps=0", "trackers=[]"),
    "model.adapter={rank:2,alpha:4}",
)

ABSENT, HUGE, DEEP, NOT_A_NUMBER = "@absent@", "@huge@", "@deep@", "@nan@"
OTHERS: tuple[Any, ...] = (
    *(ABSENT, None, [], {}, "text", "", 10**30, -1, 0.5, True, HUGE, DEEP, NOT_A_NUMBER),
)
"""What a field becomes, besides what it was."""


RESUMED = ("checkpoint", "resume")
TABLES = ("rescore", "compare", "gallery")
READERS = {
    ".json": ("trackers", "gallery", *RESUMED),
    ".safetensors": RESUMED,
    ".jsonl": ("gallery", "resume"),
    ".yaml": (*TABLES, *RESUMED),
    ".parquet": TABLES,
    ".png": (*TABLES, "resume"),
    ".lock": ("resume",),
}
"""Which readers look into a file, by its suffix; others would read what is whole."""


@dataclass(frozen=True)
class Damage:
    """One file, what is done to it, and how that is called."""

    file: str
    name: str
    act: Callable[[Path], object]


@dataclass(frozen=True)
class RealRun:
    folder: Path
    config: Config
    models: Any


def train(config: Config, models: Any) -> None:
    """To the end of the run, which has been reached where it is whole."""
    launch = Launch(Accelerator(), Processes())
    opened = open_run(config)
    try:
        prompts = build_prompts(config)
        build_trainer(config, models, prompts, opened, launch, Console(quiet=True)).run()
    finally:
        opened.lock.release()


def compose(folder: Path, run_dir: Path) -> Config:
    data = (f"data.path={folder / 'prompts.jsonl'}", f"data.eval_path={folder / 'prompts.jsonl'}")
    return compose_config(CONFIGS, "tiny", [*SETTINGS, *data, f"run_dir={run_dir}"])


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> RealRun:
    """Two steps of the embedded model, to the end."""
    folder = tmp_path_factory.mktemp("real")
    Image.effect_noise((64, 64), 90).convert("RGB").save(folder / "noise.png")
    prompt = {"prompt": "a sign", "id": "sign", "target": "noise.png"}
    (folder / "prompts.jsonl").write_text(json.dumps(prompt))
    config = compose(folder, folder / "day" / "run")
    models = build_models(config, Accelerator().device, needs_reference=True)
    train(config, models)
    # Of a tracker that needs a server.
    (folder / "day" / "run" / "trackers.json").write_text('{"wandb": "abc"}')
    return RealRun(folder, config, models)


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of the fields of a JSON value; of long lists and sections of equals, the first ones."""
    yield path
    if isinstance(value, dict):
        keys = list(value) if len(path) < 3 else list(value)[:12]
    else:
        keys = list(range(min(2, len(value)))) if isinstance(value, list) else []
    for key in keys:
        yield from nodes(value[key], (*path, key))


def changed(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    """A copy in which the field at a path is another, or absent."""
    if not path:
        return "" if other == ABSENT else other
    value = copy.deepcopy(value)
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    if other == ABSENT:
        del parent[path[-1]]
    else:
        parent[path[-1]] = other
    return value


def to_text(value: Any) -> str:
    """JSON, with what Python's own values cannot say."""
    text = json.dumps(value).replace(f'"{HUGE}"', "1e400").replace(f'"{NOT_A_NUMBER}"', "NaN")
    return text.replace(f'"{DEEP}"', "[" * 5000 + "]" * 5000)


def sealed(text: str) -> str:
    """A manifest with the checksum that belongs to it, as one would who wants it believed."""
    try:
        values = json.loads(text)
        del values["sha256"]
        content = json.dumps(values, sort_keys=True).encode()
        return text[:-1] + f', "sha256": "{hashlib.sha256(content).hexdigest()}"}}'
    except (RecursionError, TypeError, KeyError):
        return text


def field_damages(file: str, value: Any, write: Callable[[Path, str], object]) -> Iterator[Damage]:
    for path in nodes(value):
        for other in OTHERS:
            name = f"{'.'.join(map(str, path)) or 'all'} = {other!r}"
            text = to_text(changed(value, path, other))
            yield Damage(file, name, lambda place, text=text: write(place, text))


def byte_damages(file: str) -> Iterator[Damage]:
    def cut(part: float) -> Callable[[Path], object]:
        return lambda path: os.truncate(path, int(path.stat().st_size * part))

    def scramble(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[len(content) // 3 : len(content) // 2] = random.Random(0).randbytes(
            len(content) // 2 - len(content) // 3
        )
        path.write_bytes(content)

    def replace_by_folder(path: Path) -> None:
        path.unlink()
        path.mkdir()

    yield Damage(file, "removed", lambda path: path.unlink())
    yield Damage(file, "emptied", lambda path: path.write_bytes(b""))
    yield Damage(file, "cut in half", cut(0.5))
    yield Damage(file, "cut by a tenth", cut(0.9))
    yield Damage(file, "random inside", scramble)
    yield Damage(file, "random", lambda path: path.write_bytes(random.Random(1).randbytes(999)))
    yield Damage(file, "no UTF-8", lambda path: path.write_bytes(b"\xed\xa0\x80\n"))
    yield Damage(file, "a folder", replace_by_folder)


def table_damages(file: str, table: pyarrow.Table) -> Iterator[Damage]:
    count = table.num_rows

    def store(other: pyarrow.Table) -> Callable[[Path], object]:
        return lambda path: pyarrow.parquet.write_table(other, path)

    columns = {
        "null": pyarrow.nulls(count),
        "text": pyarrow.array(["text"] * count),
        "numbers": pyarrow.array([-1] * count),
        "huge": pyarrow.array([1e300] * count),
        "not a number": pyarrow.array([float("nan")] * count),
        "true": pyarrow.array([True] * count),
        "bytes": pyarrow.array([b"\xff\xfe"] * count),
        "no UTF-8": pyarrow.array([b"\xed\xa0\x80"] * count).cast(pyarrow.string(), safe=False),
        "lists": pyarrow.array([["a", None]] * count),
        "objects": pyarrow.array([{"a": 1}] * count),
        "long text": pyarrow.array(["images/" + "x" * 5000] * count),
        "outside": pyarrow.array(["images/../../../x"] * count),
    }
    for index, name in enumerate(table.column_names):
        yield Damage(file, f"without {name}", store(table.drop_columns([name])))
        for kind, column in columns.items():
            other = table.set_column(index, name, column)
            yield Damage(file, f"{name} of {kind}", store(other))
    yield Damage(file, "no row", store(table.slice(0, 0)))
    yield Damage(file, "a row twice", store(pyarrow.concat_tables([table, table])))
    stored = table.schema.metadata[METADATA_KEY]
    value = json.loads(stored)
    texts = [to_text(changed(value, path, other)) for path in nodes(value) for other in OTHERS]
    for content in (b"{", b"[]", b"null", b"\xff", b"", *(text.encode() for text in texts)):
        other = table.replace_schema_metadata({METADATA_KEY: content})
        yield Damage(file, f"metadata {content[:70]!r}", store(other))
    yield Damage(file, "no metadata", store(table.replace_schema_metadata(None)))


def all_damages(run: Path) -> list[Damage]:
    """Of every file but the gallery's own, which is made anew."""
    files = [path.relative_to(run) for path in sorted(run.rglob("*")) if path.is_file()]
    files = [file for file in files if file.parts[0] != "gallery"]
    damages = [damage for file in files for damage in byte_damages(str(file))]
    for file in files:
        path, name = run / file, str(file)
        if file.name == "checkpoint.json":
            value = json.loads(path.read_text())
            damages += field_damages(name, value, lambda p, text: p.write_text(sealed(text)))
        elif file.suffix == ".json":
            value = json.loads(path.read_text())
            damages += field_damages(name, value, lambda p, text: p.write_text(text))
        elif file.suffix == ".yaml":
            value = yaml.safe_load(path.read_text())
            damages += field_damages(name, value, lambda p, text: p.write_text(text))
        elif file.suffix == ".jsonl":
            damages += line_damages(name, path.read_text().splitlines())
        elif file.suffix == ".parquet":
            damages += table_damages(name, pyarrow.parquet.read_table(path))
    return damages


def line_damages(file: str, lines: list[str]) -> Iterator[Damage]:
    for number in range(len(lines)):
        before, after = lines[:number], lines[number + 1 :]

        def write(path: Path, text: str, before: Any = before, after: Any = after) -> None:
            path.write_text("".join(f"{line}\n" for line in (*before, text, *after)))

        # One metric is like another.
        row = dict(list(json.loads(lines[number]).items())[:3])
        yield from field_damages(file, row, write)
        yield Damage(file, f"without line {number}", lambda p, w=write: w(p, ""))


def command(*arguments: object) -> None:
    """As `glm-grpo`, without what makes errors short."""
    options = cli._parser().parse_args([str(argument) for argument in arguments])
    options.command(options)


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in folder.rglob("*")
        if not path.is_dir()
    }


class Case:
    """A damaged copy of the run, beside a whole one."""

    def __init__(self, real: RealRun, damage: Damage, place: Path) -> None:
        self.place, self.damage, self.real = place, damage, real
        whole = real.folder / "day" / "run"
        self.run, self.other, self.out = place / "day" / "run", place / "other", place / "out"
        shutil.copytree(whole, self.run)
        shutil.copytree(whole, self.other)
        self.out.mkdir()
        damage.act(self.run / damage.file)

    def readers(self) -> dict[str, tuple[Callable[[], object], tuple[str, ...]]]:
        """By name: what reads, and where below the place it may write."""
        run, out = self.run, self.out
        config = compose(self.real.folder, run)
        # Before the run is gone on with, which mends and removes.
        return {
            "checkpoint": (lambda: find_checkpoint(run), ()),
            "trackers": (lambda: read_run_ids(RunFolder(run)), ()),
            "rescore": (
                lambda: command("rescore", run, "reward.terms.ssim.weight=2"),
                ("day/run/rescore",),
            ),
            "compare": (lambda: command("compare", self.other, run, "--output", out), ("out",)),
            "gallery": (
                lambda: command("gallery", run, "--zip", out / "a.zip", "--sheet", out / "b.png"),
                ("day/run/gallery", "out"),
            ),
            "resume": (lambda: train(config, self.real.models), ("day/run",)),
        }

    def try_all(self) -> Iterator[tuple[str, str]]:
        """By reader: `works`, `refused`, or what is wrong."""
        readers = self.readers()
        for name in READERS[Path(self.damage.file).suffix]:
            read, may_write = readers[name]
            before, begun = snapshot(self.place), time.monotonic()
            outcome = self.judge(read)
            if time.monotonic() - begun > PATIENCE:
                outcome = f"took {time.monotonic() - begun:.0f} s"
            changes = {key for key, _ in before.items() ^ snapshot(self.place).items()}
            strays = [key for key in changes if not any(key.startswith(f"{w}/") for w in may_write)]
            yield name, f"touched {sorted(strays)[:3]}" if strays else outcome

    def judge(self, read: Callable[[], object]) -> str:
        try:
            read()
        except (GlmGrpoError, RewardError) as error:
            file = Path(self.damage.file)
            # Of one that is gone, the folder tells.
            is_named = file.name in str(error) or (
                self.damage.name in ("removed", "a folder") and str(self.place) in str(error)
            )
            # Of runs that cannot be compared, the error names run and key.
            is_named |= " in run: only runs " in str(error)
            return "refused" if is_named else f"names no file: {error}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "works"


@pytest.mark.timeout(4 * 3600)
def test_every_stored_file_is_read_or_refused_by_name(
    real_run: RealRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    damages = all_damages(real_run.folder / "day" / "run")
    tried = os.environ.get("GLM_GRPO_SWEEP", DEFAULT_TRIED)
    random.Random(0).shuffle(damages)
    if tried.isdecimal():
        chosen = damages[: int(tried)]
    else:
        chosen = [each for each in damages if re.search(tried, f"{each.file}: {each.name}")]
    counts: Counter[tuple[str, str]] = Counter()
    wrong = []
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    for damage in chosen:
        case = Case(real_run, damage, tmp_path / "case")
        for reader, outcome in case.try_all():
            counts[reader, outcome if outcome in ("works", "refused") else "wrong"] += 1
            if outcome not in ("works", "refused"):
                wrong.append(f"{damage.file}: {damage.name}: {reader}: {outcome[:300]}")
        shutil.rmtree(tmp_path / "case")

    with capsys.disabled():
        figures = ", ".join(f"{' '.join(key)} {count}" for key, count in sorted(counts.items()))
        print(f"\n{len(chosen)} of {len(damages)} damages: {figures}")  # noqa: T201
    assert list((tmp_path / "here").iterdir()) == []
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong)
