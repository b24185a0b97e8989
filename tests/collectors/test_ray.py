"""A real collector: it is watched, killed, replaced, and fails at last in the fourth step."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from glm_grpo.collectors.ray_cluster import RayCluster
from glm_grpo.config.sections import AsyncSection
from glm_grpo.errors import ConfigError
from glm_grpo.run.checkpoints import load_checkpoint
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import MetricsRow, read_metrics, read_table
from tests.programs import ROOT, Program, Programs

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")

pytestmark = pytest.mark.long

SOON = 180.0
"""Seconds after which a test gives up on a run."""

SECRET = "4f1d8c2ab97e63f05d7c"
PROMPTS = [
    f'a red sign "{word}"' for word in ("CAT", "DOG", "SUN", "SEA", "TEA", "BUS", "HAT", "ICE")
]
"""Two for each of four steps."""
TERM = """
import os
import sys
from pathlib import Path

from glm_grpo.models.glm_image import token_grid

# As the fixture `small_preview`, in the learner and in collectors.
token_grid._PREVIEW_SIDE = 2

def brightness(prompts, pixels):
    is_collector = Path(sys.argv[0]).name != "train.py"
    if is_collector and prompts[0].prompt_id == os.environ["FAILS_ON"]:
        raise ConnectionError("the scorer is gone")
    return pixels.float().mean(dim=(1, 2, 3)) / 255
"""


@dataclass
class Run:
    """A run of train.py on the embedded model, with one cheap term of the user's own."""

    path: Path
    program: Program

    @property
    def log(self) -> str:
        return self.program.said()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + SOON
        while not is_so():
            assert self.program.wait(0.05) is None, self.log
            assert time.monotonic() < end, self.log

    def rows(self) -> list[MetricsRow]:
        return read_metrics(RunFolder(self.path))

    def figures(self) -> list[MetricsRow]:
        """All metrics that depend neither on the clock, nor on memory, nor on who collects."""
        besides = ("time/", "throughput/", "memory/", "async/", "eval/")
        return [
            {name: value for name, value in row.items() if not name.startswith(besides)}
            for row in self.rows()
        ]

    def processes(self) -> list[psutil.Process]:
        """Its own, those that it started, and theirs."""
        own = psutil.Process(self.program.pid)
        return [own, *own.children(recursive=True)]

    def collectors(self) -> list[psutil.Process]:
        found = []
        for process in self.processes():
            # A helper of Ray's may have ended meanwhile, or be a zombie.
            with contextlib.suppress(psutil.NoSuchProcess):
                if "".join(process.cmdline()).startswith("ray::Collector"):
                    found.append(process)
        return found


Start = Callable[..., Run]


@pytest.fixture(scope="module")
def start(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Starts runs of four steps, each in a folder of its own."""

    def begin(*overrides: str, environment: Mapping[str, str] | None = None) -> Run:
        folder = tmp_path_factory.mktemp("async")
        (folder / "prompts.txt").write_text("\n".join(PROMPTS))
        (folder / "held-out.txt").write_text(PROMPTS[0])
        (folder / "own_term.py").write_text(TERM)
        program = programs.start(
            folder,
            str(ROOT / "train.py"),
            "train.steps=4",
            *("rollout.prompts_per_step=2", "rollout.group_size=2", "train.micro_batch_size=4"),
            *("rollout.height=64", "rollout.width=64", "decode.steps=1"),
            *("train.checkpoint_every=1", "train.eval_every=1000", "eval.samples_per_prompt=1"),
            *(f"data.path={folder / 'prompts.txt'}", f"data.eval_path={folder / 'held-out.txt'}"),
            # Images of a group that differ.
            "rollout.temperature=2",
            *(f"reward.terms.{name}=null" for name in ("lpips", "ssim", "ocr", "aesthetic")),
            "+reward.terms.own.kind=custom",
            "+reward.terms.own.function=own_term:brightness",
            "+reward.terms.own.weight=1",
            "reward.allow_image_only=true",
            *("optim.warmup_steps=0", "optim.schedule=constant", "trackers=[]"),
            f"run_dir={folder / 'run'}",
            *overrides,
            env={
                # With as many threads as a collector has, the learner rounds as it does.
                "OMP_NUM_THREADS": "1",
                # Ray would end collectors where other tests take the machine's memory.
                "RAY_memory_monitor_refresh_ms": "0",
                **(environment or {}),
            },
            is_one_stream=True,
        )
        return Run(folder / "run", program)

    return begin


@pytest.fixture(scope="module")
def synchronous(start: Start) -> Run:
    run = start()
    assert run.program.wait(SOON) == 0, run.log
    return run


@dataclass(frozen=True)
class Seen:
    """What was to be seen of a run with a collector while it worked.

    Attributes:
        listening: Addresses.
        commands: Command lines.
        environment: Of the collector.
        secrets_in: Files of Ray's that hold a secret.
        folder: Ray's.
        mode: Of the folder.
    """

    run: Run
    processes: list[psutil.Process]
    listening: set[str]
    commands: str
    environment: dict[str, str]
    secrets_in: list[Path]
    folder: Path
    mode: int


@pytest.fixture(scope="module")
def collected(start: Start, synchronous: Run) -> Seen:
    """A run at age 0 whose collector is killed, and whose term fails in the fourth step."""
    last = read_table(RunFolder(synchronous.path).rollout_path(4))["prompt_id"][0].as_py()
    run = start(
        *("train.mode=async", "async.collectors=1", "async.max_policy_age=0"),
        environment={"JUDGE_API_KEY": SECRET, "FAILS_ON": last},
    )
    run.wait_until(lambda: bool(run.collectors()))
    processes = run.processes()
    listening = {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    commands = " ".join(argument for process in processes for argument in process.cmdline())
    (folder,) = {Path(name) for name in re.findall(r"/tmp/glm-ray-\w+", commands)}
    inside = run.collectors()[0].environ()
    secrets = (SECRET.encode(), inside["RAY_AUTH_TOKEN"].encode())
    files = [file for file in folder.rglob("*") if file.is_file()]
    found = [file for file in files if any(secret in file.read_bytes() for secret in secrets)]
    mode = folder.stat().st_mode
    run.wait_until(lambda: len(run.rows()) > 1)
    run.collectors()[0].kill()
    assert run.program.wait(SOON) == 1, run.log
    return Seen(run, processes, listening, commands, inside, found, folder, mode)


def test_age_0_equals_a_synchronous_run_to_the_last_figure(
    synchronous: Run, collected: Seen
) -> None:
    figures = synchronous.figures()[:4]
    assert len(figures) == 4
    assert figures[1]["reward/std"] > 0
    assert collected.run.figures() == figures
    folders = [RunFolder(run.path) for run in (synchronous, collected.run)]
    for step in range(1, 4):
        ours, theirs = (read_table(folder.rollout_path(step)) for folder in folders)
        assert ours.drop(columns="image").equals(theirs.drop(columns="image"))
    ours, theirs = (load_checkpoint(folder.checkpoint_dir(3)) for folder in folders)
    for stem in ("policy", "optimizer"):
        for name, tensor in ours.tensors[stem].items():
            assert torch.equal(tensor, theirs.tensors[stem][name]), name
    assert [row["async/policy_age"] for row in collected.run.rows()[1:]] == [0, 0, 0]


def test_a_term_that_fails_in_a_collector_stops_the_run_with_its_images(collected: Seen) -> None:
    assert "RewardError: term own, prompt " in collected.run.log
    assert "ConnectionError: the scorer is gone" in collected.run.log
    assert "Traceback" not in collected.run.log
    images = (collected.run.path / "failures" / "step-000004").glob("*.png")
    assert len(list(images)) == 2


def test_collectors_listen_to_this_machine_alone(collected: Seen) -> None:
    assert collected.listening
    for address in collected.listening:
        ip = ipaddress.ip_address(address)
        assert (getattr(ip, "ipv4_mapped", None) or ip).is_loopback, address


def test_collectors_get_secrets_and_keep_them_out_of_files_and_command_lines(
    collected: Seen,
) -> None:
    assert collected.environment["JUDGE_API_KEY"] == SECRET
    assert collected.secrets_in == []
    assert collected.mode & 0o077 == 0
    for secret in (SECRET, collected.environment["RAY_AUTH_TOKEN"]):
        assert secret not in collected.commands


def test_a_run_that_ended_leaves_no_process_and_no_file(collected: Seen) -> None:
    assert psutil.wait_procs(collected.processes, timeout=30)[1] == []
    assert not collected.folder.exists()


def test_a_collector_that_is_killed_is_replaced(collected: Seen) -> None:
    assert "another one replaces it" in collected.run.log
    assert sum(row["async/restarts"] or 0 for row in collected.run.rows()[1:]) == 1


def test_a_cluster_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"async.address = '127.0.0.1:1': cannot connect to a Ray cluster"
    ):
        RayCluster(AsyncSection(collectors=1, address="127.0.0.1:1"))


def test_a_cluster_that_is_too_small_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RayCluster, "_start", lambda self, section: None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    with pytest.raises(
        ConfigError, match=r"async.gpus_per_collector = 1.0: 2 collectors .* 2 GPUs"
    ):
        RayCluster(AsyncSection(collectors=2, gpus_per_collector=1.0))
