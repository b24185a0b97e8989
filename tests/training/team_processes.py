"""What each of two processes finds in a team; started by test_team.py through torchrun.

usage: torchrun --nproc_per_node=2 team_processes.py FOLDER, which gets RANK.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from glm_grpo.errors import PeerError
from glm_grpo.training.distributed.processes import OnMain, Team, current_team
from glm_grpo.training.distributed.strategy import make_accelerator


def caught(work):
    """What it raises, as class and text; else what it returns."""
    try:
        return ["returned", work()]
    except (ValueError, PeerError) as error:
        return [type(error).__name__, str(error)]


def fail_in(team: Team, *ranks: int):
    with team.together():
        if team.rank in ranks:
            raise ValueError(f"rank {team.rank} stumbled")


def update(team: Team):
    """Joins gradients through the group that the team does not use."""
    with team.watched():
        torch.distributed.all_reduce(torch.ones(1))


def fail_on_main(team: Team):
    def work():
        raise ValueError(f"rank {team.rank} cannot write")

    team.on_main(work)


def use_on_main(team: Team):
    made = []
    things = OnMain(team, lambda: made.append(team.rank) or ["thing"])
    things(lambda thing: thing.append("used"))
    return {"made": made, "thing": things(list)}


def find(team: Team) -> dict:
    calls = []
    found = {
        "gather": team.gather(10 * team.rank),
        "gather on main": team.gather_on_main(10 * team.rank),
        "any": [team.any(team.rank == 1), team.any(False)],
        "on main": team.on_main(lambda: calls.append(team.rank) or "done"),
        "calls": calls,
        "alike": caught(lambda: fail_in(team)),
        "failure of none": team.failure,
        "one fails": caught(lambda: fail_in(team, 1)),
        "failure": vars(team.failure),
        # They still agree on what to do next, and on why.
        "after": team.on_main(lambda: "saved"),
        "failure stays": vars(team.failure),
        "both fail": caught(lambda: fail_in(team, 0, 1)),
        "main fails": caught(lambda: fail_on_main(team)),
        "last failure": vars(team.failure),
        "things": use_on_main(team),
    }
    return found


def main() -> None:
    make_accelerator()
    team = current_team()
    found = find(team)
    if team.rank == 1:
        write(team, found)
        # Gone without a word, and without an error that the launcher would end the other for.
        os._exit(0)
    found["other gone"] = caught(lambda: team.gather(0))
    found["other gone in an update"] = caught(lambda: update(team))
    found["other gone, and this one fails"] = caught(lambda: fail_in(team, 0))
    write(team, found)
    os._exit(0)


def write(team: Team, found: dict) -> None:
    Path(sys.argv[1], f"{team.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
