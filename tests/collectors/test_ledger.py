"""Whoever finishes, dies or waits when: each step is taken once, in order, never too old."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_grpo.collectors.ledger import Assignment, Ledger, Steps


def make_ledger(
    *, age: int = 1, first: int = 1, last: int = 9, each: int = 1, collectors: int = 1
) -> Ledger[str]:
    steps = Steps(first=first, last=last, updates_each=each, max_age=age, collectors=collectors)
    return Ledger(steps, (first - 1) * each)


def given_out(ledger: Ledger[str]) -> list[tuple[int, int]]:
    """Steps that may be given out now, with the updates of their weights."""
    found = []
    while (assignment := ledger.give_out()) is not None:
        found.append((assignment.step, assignment.policy_updates))
    return found


@pytest.mark.parametrize(
    ("age", "each", "expected"),
    [
        # With weights of 0 updates, step s is trained on after (s - 1) * each updates.
        (0, 1, [1]),
        (2, 1, [1, 2, 3]),
        (0, 2, [1]),
        (1, 2, [1]),  # step 2 would be 2 updates old
        (2, 2, [1, 2]),
    ],
)
def test_ledger_gives_out_what_will_not_be_too_old(
    age: int, each: int, expected: list[int]
) -> None:
    assert [step for step, _ in given_out(make_ledger(age=age, each=each))] == expected


def test_ledger_goes_on_where_weights_are_pushed() -> None:
    ledger = make_ledger(age=1)
    assert given_out(ledger) == [(1, 0), (2, 0)]
    ledger.push(1)
    assert given_out(ledger) == [(3, 1)]


def test_ledger_of_a_resumed_run_begins_with_the_step_after_and_ends_with_the_last() -> None:
    assert given_out(make_ledger(age=5, first=5, last=7, each=2)) == [(5, 8), (6, 8), (7, 8)]


def test_ledger_gives_a_lost_batch_out_again_as_it_was() -> None:
    ledger = make_ledger(age=1)
    first = ledger.give_out()
    assert first is not None
    ledger.push(1)
    ledger.lose(first.number)
    again = ledger.give_out()
    assert again is not None
    assert (again.step, again.policy_updates) == (1, 0)
    assert again.number != first.number
    # Its weights are kept.
    assert ledger.oldest == 0


def test_ledger_takes_a_step_once() -> None:
    ledger = make_ledger()
    assignment = ledger.give_out()
    assert assignment is not None
    ledger.finish(assignment.number, "it")
    assert ledger.waiting == 1
    assert ledger.take(1) == (assignment, "it")
    assert ledger.take(1) is None
    assert ledger.waiting == 0


@given(
    seed=st.integers(0, 2**32),
    collectors=st.integers(1, 4),
    age=st.integers(0, 5),
    each=st.integers(1, 3),
    push_every=st.integers(1, 4),
)
def test_each_step_is_taken_once_in_order_and_never_too_old(
    seed: int, collectors: int, age: int, each: int, push_every: int
) -> None:
    """A learner and collectors that take turns at random, and may die at any moment."""
    draws = random.Random(seed)
    last, learned = 12, 0
    push_every = min(push_every, (age // each + 1) * each)  # as the config asks for
    steps = Steps(1, last, each, age, collectors)
    ledger: Ledger[Assignment] = Ledger(steps, 0)
    busy: dict[int, Assignment] = {}
    pushes = [0]
    deaths = 0
    while learned < last:
        moves = ["learn", *(f"{verb} {index}" for index in busy for verb in ("end", "die"))]
        moves += [f"begin {index}" for index in range(collectors) if index not in busy]
        verb, _, index = draws.choice(moves).partition(" ")
        if verb == "begin" and (assignment := ledger.give_out()) is not None:
            busy[int(index)] = assignment
        elif verb == "end":
            assignment = busy.pop(int(index))
            ledger.finish(assignment.number, assignment)
        elif verb == "die" and deaths < 5:
            deaths += 1
            ledger.lose(busy.pop(int(index)).number)
        elif verb == "learn" and (entry := ledger.take(learned + 1)) is not None:
            assignment, made_for = entry
            assert made_for is assignment
            assert 0 <= ledger.age(assignment) == learned * each - assignment.policy_updates <= age
            if steps.are_weights_settled:
                new_enough = [push for push in pushes if learned * each - push <= age]
                assert assignment.policy_updates == new_enough[0]
            learned += 1
            if learned * each - pushes[-1] >= push_every:
                pushes.append(learned * each)
            ledger.push(pushes[-1])
    assert ledger.give_out() is None
    assert ledger.waiting == 0
