"""Every benchmark at its smallest size: it runs, and its figures make sense.

Whether ours and theirs compute the same is checked by the benchmarks themselves, which raise where
images, scores, advantages, losses or gradients differ by more than rounding.
"""

from __future__ import annotations

import math

import pytest

from benchmarks import __main__ as every
from benchmarks import (
    decode,
    janus_pro,
    overlap,
    rewards,
    rollout,
    step,
    timing,
    update,
)


def check_result(result: dict, *, unit: str) -> None:
    assert result["unit"] == unit
    assert result["ratio"] == pytest.approx(result["ours"] / result["theirs"])
    assert 0 < result["lowest"] <= result["ratio"] * (1 + 1e-9)
    assert result["ratio"] <= result["highest"] * (1 + 1e-9)
    assert all(math.isfinite(value) for value in result["details"].values())
    assert result["command"].startswith("python -m benchmarks.")


@pytest.mark.long
def test_rollout(run_benchmark) -> None:
    report = run_benchmark(rollout.main, "--prompts", "1", "--group", "2", "--repeats", "1")
    (result,) = report["results"]
    check_result(result, unit="tokens/s")
    assert result["details"]["tokens"] == 2 * 272
    assert result["target"] is None
    assert report["machine"]["threads"] >= 1


@pytest.mark.long
def test_decode(run_benchmark) -> None:
    report = run_benchmark(decode.main, "--groups", "3", "2", "--repeats", "1")
    assert [result["phase"] for result in report["results"]] == ["decode 1 x 3", "decode 1 x 2"]
    for result in report["results"]:
        check_result(result, unit="images/s")
        assert result["details"]["largest_difference"] <= decode.TOLERANCE


@pytest.mark.long
def test_rewards(run_benchmark) -> None:
    sizes = ("--prompts", "1", "--group", "2", "--repeats", "1")
    (result,) = run_benchmark(rewards.main, *sizes)["results"]
    check_result(result, unit="images/s")
    assert result["details"]["largest_difference"] <= rewards.TOLERANCE


@pytest.mark.long
def test_step(run_benchmark) -> None:
    sizes = ("--prompts", "1", "--group", "2", "--repeats", "1")
    (result,) = run_benchmark(step.main, *sizes)["results"]
    check_result(result, unit="images/s")
    assert set(result["details"]) == {
        "advantages_difference",
        "loss_difference",
        "gradient_norm_difference",
    }


@pytest.mark.long
def test_step_refuses_to_measure_another_loss(monkeypatch) -> None:
    def doubled(self, totals):
        return 2 * honest(self, totals)

    honest = step.PlainGrpo.advantages
    monkeypatch.setattr(step.PlainGrpo, "advantages", doubled)
    with pytest.raises(RuntimeError, match="advantages differ by"):
        step.compare_learning(step.tiny_config(prompts=1, group_size=2))


@pytest.mark.long
def test_overlap(run_benchmark) -> None:
    sizes = ("--prompts", "2", "--group", "2", "--repeats", "1")
    (result,) = run_benchmark(overlap.main, *sizes)["results"]
    check_result(result, unit="s")
    details = result["details"]
    # Four images wait 0.05 s each; overlapped, those of the first prompt wait during decoding.
    assert details["reward_in_phases"] >= 0.2
    assert details["reward_overlapped"] < details["reward_in_phases"]


@pytest.mark.long
def test_update(run_benchmark) -> None:
    sizes = ("--side", "32", "--batch", "2", "--repeats", "1")
    results = run_benchmark(update.main, *sizes)["results"]
    for result, unit in zip(results, ("s", "MB"), strict=True):
        check_result(result, unit=unit)
        assert result["details"]["tokens"] == 257
        assert result["details"]["grad_norm_relative"] < 1e-4
        assert result["details"]["entropy_difference"] < 1e-4
        assert result["details"]["floor_seconds"] > 0
        assert result["details"]["floor_ratio"] > 0


@pytest.mark.parametrize("is_strict", [False, True])
def test_missed_target_ends_with_exit_code_1_only_if_strict(
    is_strict, run_benchmark, monkeypatch
) -> None:
    labels = timing.Labels("step", "plain", "images/s", "python -m benchmarks.step")
    missed = timing.compare(labels, [1.0], [1.0], target=timing.Target("at least", 2.0))
    monkeypatch.setattr(every, "run_phase", lambda phase, repeats: [missed])
    if is_strict:
        with pytest.raises(SystemExit) as ended:
            run_benchmark(every.main, "--strict")
        assert ended.value.code == 1
    else:
        results = run_benchmark(every.main)["results"]
        assert results == [timing.to_json(missed)] * len(every.PHASES)


def test_every_row_of_the_table_is_a_module_that_takes_its_options() -> None:
    modules = {
        "rollout": rollout,
        "janus_pro": janus_pro,
        "update": update,
        "decode": decode,
        "rewards": rewards,
        "step": step,
        "overlap": overlap,
    }
    assert {phase[0] for phase in every.PHASES} == set(modules)
    for name, *options in every.PHASES:
        with pytest.raises(SystemExit) as ended:
            modules[name].main([*options, "--help"])
        assert ended.value.code == 0
