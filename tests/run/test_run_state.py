"""Where a run stands."""

from __future__ import annotations

from glm_grpo.run.run_state import RunState


def test_best_evaluation_is_the_first_of_the_highest_total() -> None:
    state = RunState()
    found = []
    for step, total in ((2, -0.5), (4, -0.75), (6, 0.25), (8, 0.25)):
        state.step = step
        found.append(state.note_best(total))
    assert found == [True, False, True, False]
    assert (state.best_step, state.best_total) == (6, 0.25)
