"""Libraries report to their makers unless told not to: importing the packages tells them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

WATCH = """
import sys

def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        print(event, arguments)

sys.addaudithook(watch)
"""

SCORE = """
from PIL import Image
from rewards import score_images

white = Image.new("RGB", (64, 64), "white")
config = {"terms": {"ocr": {"weight": 1.0, "engine": "rapidocr"}}}
assert list(score_images(['a sign that says "A"'], [white], config).ocr) == [0.0]
"""


@pytest.mark.parametrize(
    "program",
    [SCORE, "import rewards, onnxruntime", "import glm_grpo, onnxruntime"],
    ids=["score_images", "rewards", "glm_grpo"],
)
def test_a_run_looks_up_no_name_and_leaves_no_file_at_home(program: str, tmp_path: Path) -> None:
    # onnxruntime's own look-ups are not seen here, but before them it stores the id of a device. An
    # environment of its own, because it does neither where a variable says that tests run.
    found = subprocess.run(
        [sys.executable, "-c", WATCH + program],
        env={"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == ""
    assert list(tmp_path.rglob("*")) == []


def test_what_users_set_is_kept() -> None:
    program = "import os, rewards; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    environment = {**os.environ, "ORT_DISABLE_TELEMETRY": "0"}
    command = [sys.executable, "-c", program]
    assert subprocess.check_output(command, env=environment, cwd=ROOT, text=True) == "0\n"
