"""The command that serves a term: on this machine alone, and to who knows its token."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import httpx
import pytest
import torch

from rewards.messages import make_request
from rewards.serve import main
from rewards.types import Prompt
from tests.programs import Programs

VARIABLE = "GLM_GRPO_REWARD_TOKEN"
PIXELS = torch.arange(2, dtype=torch.uint8)[:, None, None, None].expand(2, 3, 2, 2)
REQUEST = make_request([Prompt("dog", "a dog")] * 2, PIXELS, ()).model_dump(mode="json")
SCORING = "def level(prompts, pixels):\n    return pixels.float().mean(dim=(1, 2, 3))\n"


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def test_serve_listens_on_loopback_for_who_knows_the_token_and_ends_at_sigterm(
    tmp_path: Path, programs: Programs
) -> None:
    (tmp_path / "scoring.py").write_text(SCORING)
    options = json.dumps({"kind": "custom", "function": "scoring:level"})
    arguments = ("-m", "rewards.serve", "--name", "mine", "--options-json", options)
    process = programs.start(tmp_path, *arguments)
    while "listening on" not in process.said():
        assert process.wait(0.1) is None, process.stderr.read_text()
    (url,) = re.findall(r"^listening on (http://127\.0\.0\.1:\d+)\n$", process.said())
    (token,) = re.findall(rf"export {VARIABLE}=([\w-]{{43}})\n$", process.stderr.read_text())

    headers = {"Authorization": f"Bearer {token}"}
    info = httpx.get(f"{url}/info", headers=headers, trust_env=False).json()
    assert info == {"protocol": 1, "name": "mine", "needs": ["prompt"], "digest": info["digest"]}
    assert re.fullmatch("[0-9a-f]{16}", info["digest"])
    for given, status in (("of-someone-else", 401), (token, 200)):
        headers = {"Authorization": f"Bearer {given}"}
        answer = httpx.post(f"{url}/score", json=REQUEST, headers=headers, trust_env=False)
        assert answer.status_code == status
    assert answer.json()["scores"] == [0.0, 1.0]

    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(20) == -signal.SIGTERM


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "192.168.0.1"])
def test_serve_opens_no_port_to_other_machines_without_a_token(host: str) -> None:
    with pytest.raises(SystemExit, match=VARIABLE):
        main(["--name", "ssim", "--host", host])


@pytest.mark.parametrize("token", ["", "fifteen-letters", "with a space in between"])
def test_serve_refuses_a_token_that_is_none_without_repeating_it(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, token)
    with pytest.raises(SystemExit, match=f"{VARIABLE} has {len(token)} char") as caught:
        main(["--name", "ssim"])
    assert not token or token not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ('{"kind": "smim"}', "did you mean ssim?"),
        ("[1]", "'[1]' is not a JSON object"),
        ("{", "'{' is not a JSON object"),
    ],
)
def test_serve_says_what_is_wrong_with_the_options(options: str, error: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--name", "mine", "--options-json", options])
    assert str(caught.value).startswith("mine: ")
    assert error in str(caught.value)
