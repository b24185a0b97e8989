"""Where a run stands."""

from __future__ import annotations

from math import nan

from glm_grpo.run.run_state import RunState


def test_best_evaluation_is_the_first_of_the_highest_total() -> None:
    state = RunState()
    found = []
    for step, total in ((0, nan), (2, -0.5), (4, -0.75), (6, 0.25), (8, nan), (9, 0.25)):
        state.step = step
        found.append(state.note_best(total))
    assert found == [False, True, False, True, False, False]
    assert (state.best_step, state.best_total) == (6, 0.25)
