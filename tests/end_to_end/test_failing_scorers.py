"""Scorers that hang, die, leak, lie, or do to the process what they should not."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics
from glm_grpo.training.checkpoint.files import newest_checkpoint
from glm_grpo.training.phase import process_bytes
from rewards.process import ProcessReward
from rewards.remote.client import MAX_ANSWER_BYTES
from rewards.remote.messages import ScorerInfo
from rewards.remote.reward import LostScorerError, RemoteReward
from rewards.remote.server import RewardServer
from rewards.score import Scorer, Term
from rewards.terms.custom import CustomConfig, CustomReward
from rewards.types import Prompt, RewardError

ROOT = Path(__file__).parents[2]
DOG = Prompt("dog", "a dog")
PIXELS = torch.arange(3, dtype=torch.uint8)[:, None, None, None].expand(3, 3, 2, 2)
SOON = 30.0
"""Seconds after which a test gives up."""

FUNCTIONS = """
import os, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

calls = 0
kept = []

def bright(prompts, pixels):
    return pixels.float().mean(dim=(1, 2, 3)) / 255

def counted(prompts, pixels, at, act):
    global calls
    calls += 1
    # Two prompts are held out, and two are those of each step.
    if calls == at and not Path("repaired").exists():
        act()
    return bright(prompts, pixels)

def hang(prompts, pixels):
    # In a thread that Python waits for when it ends, as pools of a library do.
    pool = ThreadPoolExecutor()
    return counted(prompts, pixels, 5, lambda: pool.submit(time.sleep, 600).result())

def die(prompts, pixels):
    return counted(prompts, pixels, 6, lambda: os.kill(os.getpid(), signal.SIGKILL))

def leak(prompts, pixels):
    kept.append(bytearray(os.urandom(1)) * 2**25)
    return bright(prompts, pixels)

def chatter(prompts, pixels):
    print("x" * 2**19)
    print("the last line", file=sys.stderr, flush=True)
    if prompts[0].prompt == "fail":
        os._exit(3)
    return bright(prompts, pixels)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the functions that children import."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "prompts.txt").write_text("a red circle\na blue square\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(function: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """A run of two steps by train.py, in a process of its own, on one function as the term."""
    options = f"{{kind: custom, function: 'functions:{function}', weight: 1.0, timeout_seconds: 3}}"
    command = [
        *(sys.executable, str(ROOT / "train.py"), "run_dir=run", "train.steps=2"),
        *("data.path=prompts.txt", "data.eval_path=prompts.txt", "eval.samples_per_prompt=1"),
        *("rollout.height=32", "rollout.width=32", "rollout.prompts_per_step=2"),
        *("rollout.group_size=2", "train.micro_batch_size=4", "optim.warmup_steps=0"),
        *(f"~reward.terms.{name}" for name in ("lpips", "ssim", "ocr", "aesthetic")),
        *(f"+reward.terms.mine={options}", "reward.allow_untied=true", "trackers=[]"),
        *overrides,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)


def start(function: str) -> ProcessReward:
    return ProcessReward(
        CustomConfig(
            kind="custom", weight=0.0, function=f"functions:{function}", timeout_seconds=SOON
        ),
        name="mine",
        device=torch.device("cpu"),
    )


def score_with(*terms: object) -> torch.Tensor:
    """Raw scores of three pictures of one prompt, by the way of a run."""
    scorer = Scorer([Term(f"term_{index}", each, 1.0) for index, each in enumerate(terms)])
    return scorer.score([DOG], PIXELS[None]).raw[0]


class Function:
    """A function as a term, without the copies that `custom` makes."""

    def __init__(self, function: Callable[[list[Prompt], torch.Tensor], torch.Tensor]) -> None:
        self._function = function

    def applies_to(self, prompt: Prompt) -> bool:
        return True

    def score(self, prompts: list[Prompt], pixels: torch.Tensor) -> torch.Tensor:
        return self._function(prompts, pixels)

    def modules(self) -> tuple[torch.nn.Module, ...]:
        return ()


def bright(prompts: list[Prompt], pixels: torch.Tensor) -> torch.Tensor:
    return pixels.float().mean(dim=(1, 2, 3))


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return ") Z " not in Path(f"/proc/{process_id}/stat").read_text()


def wait_until(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SOON
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_so()


@pytest.mark.timeout(900)
def test_a_run_whose_term_hangs_ends_with_all_its_threads(folder: Path) -> None:
    ended = train("hang")

    assert ended.returncode == 1, ended.stderr
    (said,) = re.findall(r"^RewardError: .*", ended.stderr, re.MULTILINE)
    assert re.match(
        r"RewardError: term mine, prompt \S+: not scored within 3 seconds; the te", said
    )
    assert "The pictures are in" in said
    assert (folder / "run" / "failures" / "step-000002").is_dir()
    assert newest_checkpoint(RunFolder(folder / "run")).name == "step-000001"


@pytest.mark.timeout(900)
def test_a_run_whose_scorer_is_killed_in_a_step_goes_on_with_another(folder: Path) -> None:
    option = "+reward.terms.mine.run_in=process"
    ended = train("die", option)

    assert ended.returncode == 1, ended.stderr
    assert "the process of mine has ended with signal 9 (Killed)" in ended.stderr
    assert "Step 1 is saved; go on with train.resume=" in ended.stderr
    assert "Traceback" not in ended.stderr

    (folder / "repaired").touch()
    resumed = train("die", option, "train.resume=auto")
    assert resumed.returncode == 0, resumed.stderr
    assert [row["step"] for row in read_metrics(RunFolder(folder / "run"))] == [0, 1, 2]


def test_memory_that_a_scorer_leaks_is_seen_beside_the_run(folder: Path) -> None:
    reward = start("leak")
    reward.score([DOG], PIXELS[:1])
    before = process_bytes()
    for _ in range(4):
        reward.score([DOG], PIXELS[:1])
    grown = process_bytes() - before
    reward.close()
    # Four times 32 MiB.
    assert 0.9 * 2**27 < grown < 1.5 * 2**27
    assert process_bytes() < before


def test_memory_that_is_given_back_is_not_counted_any_more() -> None:
    before = process_bytes()
    block = np.ones(2**27, dtype=np.uint8)
    assert process_bytes() - before > 0.9 * 2**27
    del block
    assert process_bytes() - before < 0.1 * 2**27


def test_a_scorer_that_prints_fills_no_disk_and_keeps_its_last_words(folder: Path) -> None:
    reward = start("chatter")
    output = Path(f"/proc/{reward.process_id}/fd/1")
    sizes = []
    for _ in range(8):
        reward.score([DOG], PIXELS[:1])
        sizes.append(output.stat().st_size)
    assert max(sizes) < 2 * 2**20
    with pytest.raises(RewardError, match=r"exit code 3.*Its last words:\n(.*\n)?the last line$"):
        reward.score([Prompt("dog", "fail")], PIXELS[:1])
    reward.close()


def test_a_function_that_paints_over_pictures_and_targets_spoils_its_own_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def paint(prompts: list[Prompt], pixels: torch.Tensor) -> torch.Tensor:
        for prompt in prompts:
            prompt.target.fill_(99)
        return bright(prompts, pixels.fill_(200))

    monkeypatch.setattr(sys.modules[__name__], "painter", paint, raising=False)
    monkeypatch.setitem(sys.modules, "painting", sys.modules[__name__])
    prompt = Prompt("dog", "a dog", target=torch.zeros(3, 2, 2, dtype=torch.uint8))
    pixels = PIXELS.clone()
    painting = CustomReward("painting:painter", needs=("target",))
    seen = Function(lambda prompts, pixels: bright(prompts, pixels) + prompts[0].target.sum())
    scorer = Scorer([Term("painting", painting, 1.0), Term("seen", seen, 1.0)])

    table = scorer.score([prompt, replace(prompt, prompt_id="cat")], torch.stack([pixels, pixels]))

    assert table.raw[..., 0].tolist() == [[200.0] * 3] * 2
    assert table.raw[..., 1].tolist() == [[0.0, 1.0, 2.0]] * 2
    assert torch.equal(pixels, PIXELS)
    assert prompt.target.sum() == 0


def test_a_term_that_sets_seeds_and_threads_changes_no_figure_of_a_run(
    make_run, brightness
) -> None:
    def meddle(scores: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        torch.rand(7)
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        return scores

    threads = torch.get_num_threads()
    rows = []
    for name, term in (("plain", brightness()), ("meddled", brightness(meddle))):
        trainer, _, folder = make_run("train.steps=2", term=term, folder=name)
        trainer.run()
        rows.append(
            [
                {
                    k: v
                    for k, v in row.items()
                    if k.split("/")[0] not in ("time", "throughput", "memory")
                }
                for row in read_metrics(folder)
            ]
        )
    torch.set_num_threads(threads)

    assert rows[0] == rows[1]


def test_a_term_that_leaves_another_default_dtype_is_refused() -> None:
    def meddle(prompts: list[Prompt], pixels: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        return bright(prompts, pixels)

    with pytest.raises(
        RewardError, match=r"terms term_0 set .* dtype to torch.float64.*run_in=pro"
    ):
        score_with(Function(meddle))

    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    "raised", [KeyboardInterrupt("^C"), SystemExit("no"), asyncio.CancelledError("gone")]
)
def test_what_ends_a_thread_without_a_word_is_told_at_once(raised: BaseException) -> None:
    def leave(prompts: list[Prompt], pixels: torch.Tensor) -> torch.Tensor:
        raise raised

    started = time.monotonic()
    with pytest.raises(RewardError, match=f"term_0, prompt dog, .*{type(raised).__name__}: "):
        score_with(Function(leave))
    # The time limit of the term is ten minutes.
    assert time.monotonic() - started < SOON


@pytest.mark.parametrize("raised", [KeyboardInterrupt("^C"), SystemExit("no")])
def test_a_server_whose_term_exits_says_so_and_lives_on(raised: BaseException) -> None:
    def leave(prompts: list[Prompt], pixels: torch.Tensor) -> torch.Tensor:
        if len(prompts) == 3:
            raise raised
        return bright(prompts, pixels)

    info = ScorerInfo(protocol=1, name="leaver", needs=("prompt",))
    server = RewardServer(Function(leave), info, ("127.0.0.1", 0), token="of-these-tests")
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    reward = connect(server.url, token="of-these-tests")
    with pytest.raises(RewardError, match=rf"status 500\): {type(raised).__name__}"):
        reward.score([DOG] * 3, PIXELS)
    assert reward.score([DOG], PIXELS[:1]).tolist() == [0.0]
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize(
    ("scores", "error"),
    [
        (torch.zeros(3, dtype=torch.float16), r"returned torch\.float16"),
        (torch.zeros(3, dtype=torch.bfloat16), r"returned torch\.bfloat16"),
        (torch.zeros(3, device="meta"), r"scoring failed with NotImplementedError"),
        (torch.zeros(3).to_sparse(), r"scoring failed with|returned"),
    ],
)
def test_scores_that_are_no_numbers_of_this_machine_are_refused(scores, error) -> None:
    with pytest.raises(RewardError, match=f"term term_0, prompt dog, .*{error}"):
        score_with(Function(lambda prompts, pixels: scores))


@pytest.mark.gpu
def test_scores_on_an_accelerator_come_to_the_cpu() -> None:
    raw = score_with(Function(lambda prompts, pixels: bright(prompts, pixels.cuda())))
    assert raw.device.type == "cpu"
    assert raw.flatten().tolist() == [0.0, 1.0, 2.0]


def test_a_term_that_forks_and_lets_the_copy_return_leaves_none_behind() -> None:
    children = []

    def fork(prompts: list[Prompt], pixels: torch.Tensor) -> torch.Tensor:
        child = os.fork()
        if child != 0:
            children.append(child)
        return bright(prompts, pixels)

    assert score_with(Function(fork)).flatten().tolist() == [0.0, 1.0, 2.0]

    (child,) = children
    assert wait_until(lambda: not is_alive(child))
    os.waitpid(child, 0)


FORKED_AND_KILLED = """
import os, signal, time, torch
from rewards.process import ProcessReward
from rewards.terms.custom import CustomConfig
config = CustomConfig(kind="custom", weight=1.0, function="functions:bright")
reward = ProcessReward(config, name="mine", device=torch.device("cpu"))
forked = os.fork()
if forked == 0:
    os.close(1), os.close(2)
    time.sleep(120)
print(reward.process_id, forked, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_scorer_ends_with_a_run_that_is_killed_though_a_fork_of_it_lives(folder: Path) -> None:
    said = folder / "said"
    with said.open("w") as file:
        # Not a pipe, which the fork would hold open.
        subprocess.run(
            [sys.executable, "-c", FORKED_AND_KILLED],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=file,
        )
    scorer, forked = map(int, said.read_text().split())
    # The fork holds the other end of the pipe by which the scorer is told.
    assert is_alive(forked)
    assert wait_until(lambda: not is_alive(scorer))
    os.kill(forked, signal.SIGKILL)


# Servers of someone else's.

INFO = b'{"protocol": 1, "name": "level", "needs": ["prompt"]}'


def connect(url: str, *, token: str = "", retries: int = 0, timeout_seconds: float = 2.0):
    return RemoteReward(
        url, needs=("prompt",), retries=retries, timeout_seconds=timeout_seconds, token=token
    )


def answer(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {length or len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def is_whole(request: bytes) -> bool:
    head, _, body = request.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    return b"\r\n\r\n" in request and len(body) >= (int(length[1]) if length else 0)


@contextmanager
def speaking(*, to_score: Iterator[bytes] | bytes, to_info: Iterator[bytes] | bytes | None = None):
    """A server that sends what it is told in as many pieces; its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    is_open = True

    def speak(connection: socket.socket) -> None:
        with connection:
            received = b""
            while not is_whole(received):
                received += connection.recv(2**16)
            is_info = received.startswith(b"GET")
            pieces = (to_info or answer(INFO)) if is_info else to_score
            try:
                for piece in [pieces] if isinstance(pieces, bytes) else pieces:
                    connection.sendall(piece)
            except ConnectionError:
                return

    def serve() -> None:
        while is_open:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=speak, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    is_open = False
    listener.close()


def drip(content: bytes) -> Iterator[bytes]:
    for index in range(len(content)):
        yield content[index : index + 1]
        time.sleep(0.1)


def endless() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    while True:
        yield b"100000\r\n" + b" " * 2**20 + b"\r\n"


SCORES = b'{"scores": [0.0, 1.0, 2.0]}'
BOMB = zlib.compressobj(9, zlib.DEFLATED, 31)
SQUEEZED = BOMB.compress(b" " * 8 * MAX_ANSWER_BYTES) + BOMB.flush()


@pytest.mark.parametrize(
    ("to_score", "error", "said"),
    [
        (lambda: drip(answer(SCORES)), LostScorerError, "no answer to /score within 2 seconds"),
        (lambda: drip(SCORES), LostScorerError, "within 2 seconds|cannot be reached"),
        (
            lambda: answer(SCORES, length=999),
            LostScorerError,
            "cannot be reached .*Error: the answer breaks off",
        ),
        (lambda: b"", LostScorerError, "cannot be reached .*Error: the answer breaks off"),
        (lambda: os.urandom(999), LostScorerError, "cannot be reached .*RemoteProtocolError"),
        (lambda: endless(), RewardError, f"answer has more than {MAX_ANSWER_BYTES} bytes"),
        (
            lambda: answer(SQUEEZED, "Content-Encoding: gzip"),
            RewardError,
            r"cannot be read .*the answer is compressed, which was not asked for",
        ),
        (
            lambda: answer(b"", "Location: http://127.0.0.1:1/", status="302 Found"),
            RewardError,
            "answered status 302",
        ),
        (lambda: answer(b"<html>login</html>"), RewardError, "message is '<html>login</html>'"),
        (
            lambda: answer(b"<h1>oops</h1>", status="500 Internal Server Error"),
            RewardError,
            "answered status 500 Internal Server Error; that is no scorer",
        ),
        (lambda: answer(b'{"scores": [[0], [1], [2]]}'), RewardError, "scores.0 is"),
        (lambda: answer(b'{"scores": [1e999, 0, 0]}'), RewardError, "scores.0 is 'inf'"),
        (lambda: answer(b'{"scores": [1e39, 0, 0]}'), RewardError, r"scores.0 is '1e\+39'"),
        (lambda: answer(b"[" * 10**6), RewardError, "level at .* answered what are no scores"),
    ],
)
def test_a_server_that_answers_anything_else_ends_the_step_in_time(
    to_score, error, said, peak_memory
) -> None:
    def ask() -> None:
        with speaking(to_score=to_score()) as url:
            reward = connect(url)
            with pytest.raises(RewardError, match=said) as caught:
                score_with(reward)
            assert isinstance(caught.value.__cause__, error)

    started = time.monotonic()
    grown = peak_memory(ask)
    assert time.monotonic() - started < 2 + SOON / 3
    assert grown < 4 * MAX_ANSWER_BYTES


def test_a_server_that_drips_before_the_run_begins_is_given_up() -> None:
    started = time.monotonic()
    with (
        speaking(to_score=b"", to_info=drip(answer(INFO))) as url,
        pytest.raises(RewardError, match="no answer to /info within 2 seconds"),
    ):
        connect(url)
    assert time.monotonic() - started < 2 + SOON / 3


def black_png(side: int) -> bytes:
    """A whole picture: some hundred kilobytes, and 3 bytes a pixel once it is decoded."""
    packer = zlib.compressobj(9)
    row = bytes(1 + 3 * side)
    pixels = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


@pytest.mark.parametrize(
    ("side", "count", "error"),
    [
        (13_000, 6, "pictures.0.png cannot be used (13000 x 13000, more than 67108864 pixels"),
        (8_000, 6, "has pictures of 384000000 pixels together; at most 268435456 are read"),
    ],
)
def test_small_request_of_large_pictures_is_refused_before_they_are_decoded(
    side: int, count: int, error: str, peak_memory
) -> None:
    picture = {"prompt": 0, "png": base64.b64encode(black_png(side)).decode()}
    body = json.dumps(
        {
            "protocol": 1,
            "prompts": [{"prompt_id": "a", "prompt": "a"}],
            "pictures": [picture] * count,
        }
    ).encode()
    assert len(body) < 5 * 2**20
    info = ScorerInfo(protocol=1, name="bright", needs=("prompt",))
    reward = Function(bright)
    server = RewardServer(reward, info, ("127.0.0.1", 0), token="of-these-tests")
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    answers = []

    def send() -> None:
        headers = {"Authorization": "Bearer of-these-tests"}
        answers.append(httpx.post(f"{server.url}/score", content=body, headers=headers))

    assert peak_memory(send) < 64 * 2**20
    server.should_exit = True
    thread.join()
    assert answers[0].status_code == 400
    assert error in answers[0].json()["error"]


@contextmanager
def served(port: int):
    """A real server of the term `functions:bright`; its process."""
    options = json.dumps({"kind": "custom", "function": "functions:bright"})
    arguments = ("--name", "mine", "--port", str(port), "--options-json", options)
    token = {"GLM_GRPO_REWARD_TOKEN": "of-these-tests-only"}
    process = subprocess.Popen(
        [sys.executable, "-m", "rewards.remote.serve", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **token},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert "listening on" in process.stdout.readline()
        yield process
        process.kill()


def test_a_server_that_is_killed_and_started_again_is_asked_again(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    token = "of-these-tests-only"
    with served(port) as process:
        patient = connect(url, token=token, retries=9, timeout_seconds=120.0)
        hasty = connect(url, token=token)
        expected = patient.score([DOG] * 3, PIXELS)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with pytest.raises(LostScorerError, match=f"{url} cannot be reached .*ConnectError"):
            hasty.score([DOG] * 3, PIXELS)
    found = []
    asking = threading.Thread(target=lambda: found.append(patient.score([DOG] * 3, PIXELS)))
    asking.start()
    with served(port):
        asking.join(120.0)
        assert len(found) == 1
        assert torch.equal(found[0], expected)
        assert torch.equal(hasty.score([DOG] * 3, PIXELS), expected)
