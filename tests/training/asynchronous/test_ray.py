"""Real collectors: the figures of a synchronous run, deaths on either side, what listens where."""

from __future__ import annotations

import ipaddress
import json
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from PIL import Image

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_table
from glm_grpo.training.checkpoint.files import load_checkpoint, newest_checkpoint

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")

pytestmark = [pytest.mark.timeout(900)]

Start = Callable[..., Any]
AGE_0 = ("train.mode=async", "async.collectors=1", "async.max_policy_age=0")
AGE_1 = ("train.mode=async", "async.collectors=2", "async.max_policy_age=1")
SECRET = "4f1d8c2ab97e63f05d7c"


@pytest.fixture(scope="module")
def undisturbed(start: Start) -> Any:
    """A run at age 1 that nothing happens to."""
    run = start(*AGE_1, "train.steps=6")
    assert run.wait() == 0, run.log
    return run


def test_age_0_equals_a_synchronous_run_to_the_last_figure(start: Start) -> None:
    plain, collected = start(), start(*AGE_0)
    assert plain.wait() == 0, plain.log
    assert collected.wait() == 0, collected.log

    assert len(plain.rows()) == 5
    assert collected.figures() == plain.figures()
    folders = [RunFolder(run.path) for run in (plain, collected)]
    for step in range(1, 5):
        ours, theirs = (read_table(folder.rollout_path(step)) for folder in folders)
        assert ours.drop(columns="image").equals(theirs.drop(columns="image"))
    ours, theirs = (load_checkpoint(newest_checkpoint(folder)) for folder in folders)
    for stem in ("policy", "optimizer"):
        for name, tensor in ours.tensors[stem].items():
            assert torch.equal(tensor, theirs.tensors[stem][name]), name
    assert [row["async/policy_age"] for row in collected.rows()[1:]] == [0, 0, 0, 0]


@pytest.mark.long
def test_edits_at_age_0_equal_a_synchronous_run(start: Start, tmp_path: Path) -> None:
    rows = []
    for index, word in enumerate(("CAT", "DOG")):
        Image.new("RGB", (128, 128), (100 * index, 200, 50)).save(tmp_path / f"{word}.png")
        rows.append({"prompt": f'write "{word}"', "source": f"{word}.png", "target": "CAT.png"})
    edits = tmp_path / "edits.jsonl"
    edits.write_text("\n".join(map(json.dumps, rows)))
    overrides = (
        f"data.path={edits}",
        f"data.eval_path={edits}",
        "data.sources=1",
        "train.steps=2",
        # The learner weighs, and learns from targets, what collectors made.
        "reward.combine=shares",
        "+reward.terms.own.at_least=0.9",
        "+reward.terms.psnr.weight=0.5",
        "anchor.weight=0.1",
    )
    plain, collected = start(*overrides), start(*AGE_0, *overrides)
    assert plain.wait() == 0, plain.log
    assert collected.wait() == 0, collected.log
    assert collected.figures() == plain.figures()
    ours, theirs = (read_table(RunFolder(run.path).rollout_path(2)) for run in (plain, collected))
    assert ours["source_token_ids"].equals(theirs["source_token_ids"])
    assert ours["token_ids"].equals(theirs["token_ids"])


def test_ages_are_bounded_and_every_step_is_there(undisturbed: Any) -> None:
    rows = undisturbed.rows()
    assert [row["step"] for row in rows] == list(range(7))
    assert [row["async/policy_age"] for row in rows[1:]] == [0, 1, 1, 1, 1, 1]
    assert all(row["time/proximal"] > 0 for row in rows[2:])


def test_metrics_of_collectors_are_documented(undisturbed: Any) -> None:
    text = (Path(__file__).parents[3] / "docs" / "reading_curves.md").read_text()
    documented = re.findall(r"^\| `(async/[a-z_]+|time/proximal)` \|", text, flags=re.MULTILINE)
    rows = undisturbed.rows()
    written = {name for name in rows[-1] if name.startswith("async/") or name == "time/proximal"}
    assert set(documented) == written


def test_a_collector_killed_at_random_changes_no_figure(start: Start, undisturbed: Any) -> None:
    run = start(*AGE_1, "train.steps=6")
    run.wait_for_step(random.randrange(4))
    # The evaluation before the first step may end before collectors have begun.
    run.wait_until(lambda: run.collectors() != [])
    random.choice(run.collectors()).send_signal(signal.SIGKILL)

    assert run.wait() == 0, run.log

    assert sum(row["async/restarts"] for row in run.rows()[1:]) == 1
    assert "another one takes its place" in run.log
    assert run.figures() == undisturbed.figures()


def test_learner_killed_leaves_no_process_and_the_run_resumes(
    start: Start, undisturbed: Any
) -> None:
    run = start(*AGE_1, "train.steps=6")
    run.wait_for_step(3)
    run.wait_until(lambda: len(run.collectors()) == 2)
    helpers, collectors = run.helpers(), run.collectors()
    run.process.kill()
    run.process.wait()
    assert psutil.wait_procs(collectors, timeout=30)[1] == []
    # Two small processes of Ray's own look for the head they have lost for about a minute.
    assert psutil.wait_procs(helpers, timeout=180)[1] == []

    resumed = start(*AGE_1, "train.steps=6", "train.resume=auto", folder=run.path.parent)
    assert resumed.wait() == 0, resumed.log

    assert [row["step"] for row in resumed.rows()] == list(range(7))
    # Up to the checkpoint as in a run that nothing happened to; from there on, the first batch is
    # younger than it was in that one.
    assert resumed.figures()[:3] == undisturbed.figures()[:3]


def test_stopped_run_leaves_no_process_and_no_file(start: Start) -> None:
    run = start(*AGE_1, "train.steps=50")
    run.wait_for_step(1)
    helpers = run.helpers()
    said = " ".join(argument for helper in helpers for argument in helper.cmdline())
    (folder,) = {Path(name) for name in re.findall(r"/tmp/glm-ray-\w+", said)}
    assert folder.exists()
    run.process.send_signal(signal.SIGTERM)

    assert run.wait() == 0, run.log

    assert "stopped and saved" in run.log
    assert psutil.wait_procs(helpers, timeout=30)[1] == []
    assert not folder.exists()


def test_a_term_that_fails_in_a_collector_stops_the_run_as_in_a_synchronous_one(
    start: Start,
) -> None:
    run = start(*AGE_1, environment={"FAILS_IN": "True"})

    assert run.wait() == 1

    assert "RewardError: term own, prompt " in run.log
    assert "ConnectionError: the scorer is gone" in run.log
    assert "Traceback" not in run.log
    assert len(list((run.path / "failures" / "step-000001").glob("*.png"))) == 2


def test_collectors_listen_to_this_machine_alone_and_keep_secrets_out_of_files(
    start: Start,
) -> None:
    run = start(*AGE_1, "train.steps=50", environment={"JUDGE_API_KEY": SECRET})
    run.wait_for_step(1)
    processes = [psutil.Process(run.process.pid), *run.helpers()]
    listening = {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening
    for address in listening:
        ip = ipaddress.ip_address(address)
        assert (getattr(ip, "ipv4_mapped", None) or ip).is_loopback, address
    collector = run.collectors()[0].environ()
    assert collector["JUDGE_API_KEY"] == SECRET
    token = collector["RAY_AUTH_TOKEN"]
    (folder,) = {Path(part) for x in processes for part in _folders(" ".join(x.cmdline())) if part}
    assert folder.parent.stat().st_mode & 0o077 == 0
    for file in folder.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert SECRET.encode() not in content, file
            assert token.encode() not in content, file
    for process in processes:
        assert token not in " ".join(process.cmdline())
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0, run.log


def _folders(command: str) -> set[str]:
    """Ray's folder, where a command line names one in it."""
    parts = command.replace("=", " ").split()
    return {part.partition("/session_")[0] for part in parts if "/glm-ray-" in part}


@pytest.mark.skipif(torch.cuda.is_available(), reason="here there is an accelerator")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("async.gpus_per_collector=1", r"async.gpus_per_collector = 1.0: 2 collectors"),
        ("async.address=127.0.0.1:1", r"async.address = '127.0.0.1:1': there is no Ray cluster"),
    ],
)
def test_a_cluster_that_will_not_do_is_refused_before_anything_is_loaded(
    start: Start, override: str, message: str
) -> None:
    run = start(*AGE_1, override)
    assert run.wait() == 2
    assert f"ConfigError: {message}" in run.log
    assert not run.path.exists()
