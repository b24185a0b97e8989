from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from rewards.remote import messages
from rewards.remote.serve import _read_term, main, serve
from rewards.types import Prompt, RewardError

DOG = Prompt("dog", "a dog")
PIXELS = torch.arange(2, dtype=torch.uint8)[:, None, None, None].expand(2, 3, 2, 2)
REQUEST = messages.encode_request([DOG, DOG], PIXELS, has_targets=False)


TOKEN = "of-these-tests-only"


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM_GRPO_REWARD_TOKEN", TOKEN)


def post(url: str, token: str = TOKEN) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.post(f"{url}/score", content=REQUEST, headers=headers, trust_env=False, timeout=10)


@contextmanager
def started(
    folder: Path, *arguments: str, function: str = "level", stdout: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own, with a function in its folder; killed at the end."""
    (folder / "scoring.py").write_text(
        "import time\n"
        "def level(prompts, pixels):\n    return pixels.float().mean(dim=(1, 2, 3))\n"
        "def hang(prompts, pixels):\n    print('begun', flush=True)\n    time.sleep(600)\n"
    )
    section = {"kind": "custom", "function": f"scoring:{function}", "weight": 0.0}
    options = json.dumps({**section, "run_in": "process"})
    command = [
        sys.executable,
        "-m",
        "rewards.remote.serve",
        "--name",
        "mine",
        "--options-json",
        options,
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, *arguments], stdin=pipe, stdout=stdout, stderr=pipe, text=True, cwd=folder
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_serve_command_listens_on_loopback_and_ends_at_sigterm(tmp_path: Path) -> None:
    with started(tmp_path) as process:
        line = process.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:"), process.stderr.read()
        url = line.removeprefix("listening on ").strip()
        info = httpx.get(
            f"{url}/info", headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False
        )
        assert info.json() == {"protocol": 1, "name": "mine", "needs": ["prompt"]}
        assert post(url).json() == {"scores": [0.0, 1.0]}
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stderr.read() == ""


def test_serve_command_ends_at_sigterm_though_a_term_hangs(tmp_path: Path) -> None:
    with started(tmp_path, function="hang") as process, ThreadPoolExecutor(1) as pool:
        url = process.stdout.readline().removeprefix("listening on ").strip()
        answer = pool.submit(post, url)
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stderr.read() == ""
        # Who asks may ask again: a server that is started anew answers.
        assert answer.result().status_code == 503


def test_serve_command_says_that_its_address_cannot_be_told(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with started(tmp_path, stdout=writing) as process:
        os.close(writing)
        assert process.wait(60) == 1
        said = process.stderr.read()
    assert said.startswith("mine: standard output, where the address http://127.0.0.1:")
    assert "cannot be written ([Errno 32] Broken pipe)" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn"])
def test_serve_names_the_extra_before_weights_are_loaded(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find(name)
    )
    with pytest.raises(RewardError, match=rf"{missing}.* pip install 'glm-grpo\[serve\]'"):
        serve(
            lambda: built.append("reward"),
            name="mine",
            needs=(),
            host="127.0.0.1",
            port=0,
            announce=built.append,
        )
    assert built == []


def test_serve_command_makes_a_token_where_there_is_none_and_says_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLM_GRPO_REWARD_TOKEN")
    with started(tmp_path) as process:
        said = process.stderr.readline()
        made = said.rpartition("export GLM_GRPO_REWARD_TOKEN=")[2].strip()
        assert re.fullmatch(r"[\w-]{43}", made), said + process.stderr.read()
        url = process.stdout.readline().removeprefix("listening on ").strip()
        assert post(url, TOKEN).status_code == 401
        assert post(url, made).json() == {"scores": [0.0, 1.0]}
        assert made.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert made not in process.stdout.read() + process.stderr.read()


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "192.168.0.1", "127.evil.example"])
def test_serve_command_refuses_other_machines_without_a_token_of_the_environment(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLM_GRPO_REWARD_TOKEN")
    with pytest.raises(SystemExit) as caught:
        main(["--name", "ssim", "--host", host])
    error = str(caught.value.code)
    assert f"host {host!r} can be reached from other machines, and there is no token" in error
    assert "export GLM_GRPO_REWARD_TOKEN" in error


@pytest.mark.parametrize("token", ["", "fifteen-letters", "with a space in between", "ünïcode" * 4])
def test_serve_command_refuses_a_token_that_is_none_without_repeating_it(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLM_GRPO_REWARD_TOKEN", token)
    with pytest.raises(SystemExit) as caught:
        main(["--name", "ssim"])
    error = str(caught.value.code)
    assert f"GLM_GRPO_REWARD_TOKEN holds {len(token)} characters" in error
    assert not token or token not in error


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ('{"kind": "smim"}', "did you mean ssim?"),
        ("[]", "--options-json is '[]'; it must be an object, as {}"),
        ("{", "--options-json '{' is no JSON (Expecting property name"),
    ],
)
def test_serve_command_says_what_is_wrong_with_the_options(options: str, error: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--name", "mine", "--options-json", options])
    assert str(caught.value.code).startswith("mine: ")
    assert error in str(caught.value.code)


def test_serve_needs_no_library_of_the_client_or_of_other_terms() -> None:
    code = """
import sys
import rewards.remote.serve
unwanted = {"httpx", "lpips", "easyocr", "rapidocr", "open_clip", "transformers", "glm_grpo"}
sys.exit(", ".join(unwanted & set(sys.modules)) or 0)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_a_term_for_evaluations_alone_is_served() -> None:
    # Who asks decides when: the server scores what it is sent.
    assert _read_term("psnr", '{"when": "evaluation", "weight": 0}').when == "always"
