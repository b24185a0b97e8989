"""Keys come from the environment, and turn up in nothing that a run writes or says."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from glm_grpo import cli
from glm_grpo.config import compose_config
from glm_grpo.errors import ConfigError
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import read_metrics, read_table
from glm_grpo.terminal import explain
from tests.programs import Programs

ROOT = Path(__file__).parents[2]
KEY = "jdg-4f1b9c7a2e8d6053"
SECRETS = {
    "JUDGE_KEY": KEY,
    "WANDB_API_KEY": "5f" * 20,
    "HF_TOKEN": "hf_" + "Qz7" * 11,
    "GLM_GRPO_REWARD_TOKEN": "token-of-the-scorer-0123456789",
    "MLFLOW_TRACKING_PASSWORD": "correct horse battery",
}
JUDGE = "+reward.terms.vlm_judge"


@contextmanager
def judging() -> Iterator[tuple[str, list[str]]]:
    """An endpoint that repeats the key it was sent; its URL, and the keys it got."""
    got: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, b"{}")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            key = self.headers["Authorization"].removeprefix("Bearer ")
            got.append(key)
            message = {"role": "assistant", "content": "7"}
            body = {"id": key, "choices": [{"message": message}], "error": f"no: {key}"}
            self.reply(200, json.dumps(body).encode())

        def reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1", got
        finally:
            server.shutdown()
            thread.join()


def train(programs: Programs, folder: Path, url: str) -> subprocess.CompletedProcess[str]:
    """A step of training with a judge, by a user who has all those keys."""
    held_out = folder / "held_out.jsonl"
    held_out.write_text('{"prompt": "red on white: a circle below the word \\"KITE\\""}\n')
    return programs.run(
        folder,
        str(ROOT / "train.py"),
        *(f"run_dir={folder / 'run'}", f"data.eval_path={held_out}", "trackers=[tensorboard]"),
        *("train.steps=1", "train.micro_batch_size=4", "optim.warmup_steps=0"),
        *("rollout.prompts_per_step=2", "rollout.group_size=2", "eval.samples_per_prompt=2"),
        *("+reward.terms.vlm_judge.weight=0.1", f"{JUDGE}.url={url}", f"{JUDGE}.model=judge"),
        *(f"{JUDGE}.api_key_variable=JUDGE_KEY", f"{JUDGE}.retries=0"),
        env=SECRETS,
        prepare="tests.small_preview:shrink_preview",
    )


def secrets_in(content: bytes) -> list[str]:
    return [name for name, value in SECRETS.items() if value.encode() in content]


def test_run_with_keys_in_the_environment_writes_and_says_none(
    programs: Programs, tmp_path: Path
) -> None:
    with judging() as (url, got):
        ended = train(programs, tmp_path, url)
    assert ended.returncode == 0, ended.stderr
    assert set(got) == {KEY}, "the judge was not asked with the key"
    assert secrets_in((ended.stdout + ended.stderr).encode()) == []

    folder = RunFolder(tmp_path / "run")
    cli.main(["gallery", str(folder.path), "--sheet", str(folder.path / "run.png")])
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {
        path: secrets_in(path.read_bytes()) for path in written if secrets_in(path.read_bytes())
    } == {}
    # Tables are compressed: what stands in them is looked for as it is read.
    for table in (*folder.rollouts_dir.iterdir(), *folder.evaluations_dir.iterdir()):
        rows = read_table(table)
        assert set(rows["note/vlm_judge"].to_pylist()) == {"7"}
        assert secrets_in(json.dumps(rows.to_pylist(), default=str).encode()) == []
    assert secrets_in(json.dumps(read_metrics(folder)).encode()) == []
    # All kinds of files were there to be looked through.
    names = {path.name for path in written} | {path.suffix for path in written}
    assert {"config.yaml", "metrics.jsonl", "run.js", "report.html", "run.png"} <= names, (
        ended.stderr
    )
    assert "JUDGE_KEY" in folder.config_path.read_text()


BASE = (f"{JUDGE}.weight=0.1", f"{JUDGE}.url=http://127.0.0.1:8000/v1", f"{JUDGE}.model=judge")


@pytest.mark.parametrize(
    ("override", "secret"),
    [
        (f"{JUDGE}.url=http://user:pass-word@judge.example/v1", "pass-word"),
        (f"{JUDGE}.api_key_variable={KEY}", KEY),
        (f"{JUDGE}.api_key=abc-def-ghi", "abc-def-ghi"),
        ("+wandb_api_key=abc-def-ghi", "abc-def-ghi"),
    ],
)
def test_key_that_stands_in_the_config_is_refused_and_not_repeated(
    configs_dir: Path, override: str, secret: str
) -> None:
    name = override.partition("=")[0]
    kept = [each for each in BASE if not each.startswith(f"{name}=")]
    with pytest.raises(ConfigError) as caught:
        compose_config(configs_dir, "tiny", [*kept, override])
    text = explain(caught.value)
    assert "[hidden]" in text
    assert secret not in text
    assert secret not in str(caught.value)
