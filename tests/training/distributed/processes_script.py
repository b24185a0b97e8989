"""What each of two processes finds of the other; started by test_processes.py through torchrun.

usage: torchrun --nproc_per_node=2 processes_script.py FOLDER, which gets RANK.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from glm_grpo.errors import PeerError
from glm_grpo.training.distributed.processes import Processes, current_processes
from glm_grpo.training.distributed.strategy import make_accelerator


def caught(work):
    """What it raises, as class and text; else what it returns."""
    try:
        return ["returned", work()]
    except (ValueError, PeerError) as error:
        return [type(error).__name__, str(error)]


def fail_in(processes: Processes, *ranks: int):
    with processes.together():
        if processes.rank in ranks:
            raise ValueError(f"rank {processes.rank} stumbled")


def update(processes: Processes):
    """Joins gradients through the group of gradients."""
    with processes.watched():
        torch.distributed.all_reduce(torch.ones(1))


def fail_on_main(processes: Processes):
    def work():
        raise ValueError(f"rank {processes.rank} cannot write")

    processes.on_main(work)


def find(processes: Processes) -> dict:
    calls = []
    found = {
        "gather": processes.gather(10 * processes.rank),
        "gather on main": processes.gather_on_main(10 * processes.rank),
        "any": [processes.any(processes.rank == 1), processes.any(False)],
        "on main": processes.on_main(lambda: calls.append(processes.rank) or "done"),
        "calls": calls,
        "alike": caught(lambda: fail_in(processes)),
        "failure of none": processes.failure,
        "one fails": caught(lambda: fail_in(processes, 1)),
        "failure": vars(processes.failure),
        # They still agree on what to do next, and on why.
        "after": processes.on_main(lambda: "saved"),
        "failure stays": vars(processes.failure),
        "both fail": caught(lambda: fail_in(processes, 0, 1)),
        "main fails": caught(lambda: fail_on_main(processes)),
        "last failure": vars(processes.failure),
    }
    return found


def main() -> None:
    make_accelerator()
    processes = current_processes()
    found = find(processes)
    if processes.rank == 1:
        write(processes, found)
        # Gone without a word, and without an error that the launcher would end the other for.
        os._exit(0)
    found["other gone"] = caught(lambda: processes.gather(0))
    found["other gone in an update"] = caught(lambda: update(processes))
    found["other gone, and this one fails"] = caught(lambda: fail_in(processes, 0))
    write(processes, found)
    os._exit(0)


def write(processes: Processes, found: dict) -> None:
    Path(sys.argv[1], f"{processes.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
