"""A Slurm of the test's own: two nodes with a pretended card each, all on this machine."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")

# Names of nodes that every machine can look up.
CONFIG = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
GresTypes=gpu
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 Gres=gpu:1
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 Gres=gpu:1
PartitionName=main Nodes=ALL Default=YES State=UP
"""
NODES = ("127.0.0.1", "127.0.0.2")

PATIENCE_SECONDS = 600.0


def why_not() -> str | None:
    """Why there can be no Slurm; None where there can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed: apt install slurm-wlm munge"
    return "slurmd needs root" if os.geteuid() != 0 else None


class Slurm:
    """Runs the programs of a Slurm.

    Args:
        folder: With its configuration.
    """

    def __init__(self, folder: Path) -> None:
        self._env = {"SLURM_CONF": str(folder / "slurm.conf")}

    def ask(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        """What a program of Slurm's says."""
        whole = {**os.environ, **(env or {}), **self._env}
        return subprocess.run(command, env=whole, check=True, text=True, stdout=-1).stdout.strip()

    def wait_for(self, job: str, state: str) -> str:
        """Waits for a state of the job; what Slurm then says of it."""
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            said = self.ask("scontrol", "show", "job", job)
            (now,) = re.findall(r"JobState=(\w+)", said)
            if now == state:
                return said
            assert now not in ("FAILED", "COMPLETED"), said
            assert time.monotonic() < end, said
            time.sleep(0.1)


@contextmanager
def started(folder: Path) -> Iterator[Slurm]:
    """A Slurm that ends with the context, and all its jobs with it."""
    with ExitStack() as stack:
        listening = [stack.enter_context(socket.create_server(("", 0))) for _ in range(3)]
        ports = [each.getsockname()[1] for each in listening]
    config = CONFIG.format(host=socket.gethostname(), folder=folder, ports=ports)
    (folder / "slurm.conf").write_text(config)
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
    munge = folder / "munge"
    munge.mkdir(mode=0o700)
    (munge / "key").write_bytes(secrets.token_bytes(64))
    (munge / "key").chmod(0o600)
    names = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed"}
    places = [f"--{option}={munge / name}" for option, name in names.items()]
    commands = [["munged", "--foreground", "--force", *places], ["slurmctld", "-D"]]
    commands += [["slurmd", "-D", "-N", node] for node in NODES]
    slurm = Slurm(folder)
    with ExitStack() as ending:
        log = ending.enter_context((folder / "log").open("w"))
        env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        for command in commands:
            daemon = subprocess.Popen(command, env=env, stdout=log, stderr=log)
            ending.callback(daemon.wait)
            ending.callback(daemon.terminate)
            time.sleep(1)
        end = time.monotonic() + PATIENCE_SECONDS
        while slurm.ask("sinfo", "--noheader", "--format=%D %t") != "2 idle":
            assert time.monotonic() < end
            time.sleep(0.2)

        def end_jobs() -> None:
            slurm.ask("scancel", "--partition=main")
            while slurm.ask("squeue", "--noheader"):
                time.sleep(0.2)

        ending.callback(end_jobs)
        yield slurm
