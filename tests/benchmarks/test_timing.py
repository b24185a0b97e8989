from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks import timing

LABELS = timing.Labels("decode 1 x 8", "stock", "images/s", "python -m benchmarks.decode")


def test_compare_divides_medians_and_keeps_the_spread_of_pairs() -> None:
    result = timing.compare(LABELS, [4.0, 6.0, 10.0], [2.0, 3.0, 2.5])
    # Medians 6 and 2.5; pairs 2, 2 and 4.
    assert (result.ours, result.theirs) == (6.0, 2.5)
    assert result.ratio == pytest.approx(2.4)
    assert (result.lowest, result.highest) == (2.0, 4.0)


@pytest.mark.parametrize(
    ("kind", "bound", "verdict"),
    [
        ("at least", 2.0, "held"),
        ("at least", 2.5, "missed"),
        ("at most", 2.5, "held"),
        ("at most", 1.9, "missed"),
    ],
)
def test_verdict_depends_on_the_side_of_the_bound(kind, bound, verdict) -> None:
    result = timing.compare(LABELS, [4.0], [2.0], target=timing.Target(kind, bound))
    assert result.verdict == verdict
    assert timing.compare(LABELS, [4.0], [2.0]).verdict == ""


def test_works_take_turns_and_every_second_round_runs_backwards() -> None:
    calls: list[str] = []
    works = {name: lambda name=name: calls.append(name) for name in "ab"}
    seconds = timing.in_turns(works, repeats=3)
    # Once each to warm up, then three rounds.
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}


@pytest.mark.parametrize("target", [None, timing.Target("at least", 2.0)])
def test_result_survives_json(target) -> None:
    result = timing.compare(LABELS, [4.0], [2.0], target=target, details={"tokens": 3.0})
    assert timing.from_json(timing.to_json(result)) == result


def test_table_has_a_row_a_result_with_target_and_verdict() -> None:
    missed = timing.compare(LABELS, [1234.5], [1000.0], target=timing.Target("at least", 2.0))
    console = Console(file=io.StringIO(), width=160)
    console.print(timing.results_table([missed, timing.compare(LABELS, [0.5], [1.0])]))
    lines = [line for line in console.file.getvalue().splitlines() if "decode 1 x 8" in line]
    assert len(lines) == 2
    for cell in ("1,234", "1,000", "1.23", ">= 2", "missed"):
        assert cell in lines[0]
    assert "0.5" in lines[1]
    assert "missed" not in lines[1]
