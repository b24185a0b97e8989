"""Processes of a run: shares of the work, and how all hear of what one of them fails at."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_grpo.data.prompts import batch_for_step, part_of_batch
from glm_grpo.errors import PeerError
from glm_grpo.training.distributed.processes import ALONE, Processes
from glm_grpo.training.out_of_memory import out_of_memory_explained
from rewards.types import Prompt, RewardError


class Captions:
    """A prompt source without images."""

    path, height, width = "captions", 32, 32

    def __init__(self, count):
        self.count = count

    def ids(self):
        return [str(index) for index in range(self.count)]

    def origins(self):
        return ["listed"] * self.count

    def captions(self):
        return [f"prompt {index}" for index in range(self.count)]

    identities = captions

    def texts(self):
        return [()] * self.count

    def metadata(self):
        return [{}] * self.count

    def digests(self):
        return {}

    def has_targets(self):
        return False

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return Prompt(prompt_id=str(index), prompt=f"prompt {index}")


@given(count=st.integers(0, 200), size=st.integers(1, 20))
def test_parts_are_all_of_it_in_order_and_differ_by_one_at_most(count, size):
    assert [[*Processes(rank, 3).part(8)] for rank in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    parts = [Processes(rank, size).part(count) for rank in range(size)]

    assert [index for part in parts for index in part] == list(range(count))
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1
    # The main process has what there is: of one held-out prompt, that one.
    assert lengths == sorted(lengths, reverse=True)


@given(
    size=st.integers(1, 8),
    more=st.integers(0, 8),
    step=st.integers(1, 50),
    seed=st.integers(0, 2**31),
)
def test_a_step_has_the_same_prompts_and_seeds_on_any_number_of_processes(size, more, step, seed):
    prompts_per_step = size + more
    whole = batch_for_step(
        Captions(prompts_per_step + 3),
        step=step,
        seed=seed,
        prompts_per_step=prompts_per_step,
        group_size=2,
    )
    parts = [
        part_of_batch(whole, Processes(rank, size).part(prompts_per_step)) for rank in range(size)
    ]

    assert tuple(prompt for part in parts for prompt in part.prompts) == whole.prompts
    assert tuple(seed for part in parts for seed in part.decode_seeds) == whole.decode_seeds
    assert {(part.seed, part.group_size) for part in parts} == {(whole.seed, whole.group_size)}
    assert all(part.prompts for part in parts)


def test_a_single_process_never_waits():
    assert ALONE.is_main
    assert ALONE.gather(3) == ALONE.gather_on_main(3) == [3]
    assert ALONE.any(True)
    assert not ALONE.any(False)
    assert ALONE.on_main(lambda: "done") == "done"


def test_the_error_of_one_process_is_its_own():
    with pytest.raises(ValueError, match="stumbled"), ALONE.together():
        raise ValueError("stumbled")
    assert ALONE.failure is None


def test_memory_that_ran_out_in_another_process_is_not_told_as_this_ones():
    told = PeerError("process 1 of 2 failed: MemoryLimitError: out of memory in the rollout phase")
    with pytest.raises(PeerError) as caught, out_of_memory_explained("records", "a step"):
        raise told
    assert caught.value is told


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RewardError("term judge, prompt 3: gloo.example: Connection reset by peer"),
    ],
)
def test_other_errors_of_an_update_are_not_told_as_a_process_that_is_gone(error):
    with pytest.raises(type(error)) as caught, Processes(0, 2).watched():
        raise error
    assert caught.value is error


def test_values_are_gathered_in_the_order_of_ranks(found):
    assert [each["gather"] for each in found] == [[0, 10], [0, 10]]
    assert [each["gather on main"] for each in found] == [[0, 10], [10]]
    assert [each["any"] for each in found] == [[True, False]] * 2


def test_the_main_process_alone_does_what_is_its_own_and_all_have_the_result(found):
    assert [each["on main"] for each in found] == ["done", "done"]
    assert [each["calls"] for each in found] == [[0], []]


def test_the_failure_of_one_ends_all_each_with_a_word_of_its_own(found):
    assert [each["alike"] for each in found] == [["returned", None]] * 2
    assert [each["failure of none"] for each in found] == [None, None]
    told = "process 1 of 2 failed: ValueError: rank 1 stumbled"
    assert [each["one fails"] for each in found] == [
        ["PeerError", told],
        ["ValueError", "rank 1 stumbled"],
    ]


def test_all_know_the_failure_as_long_as_they_end_together(found):
    failure = [1, "ValueError: rank 1 stumbled", "UNKNOWN"]
    assert [each["failure"] for each in found] == [failure, failure]
    assert [each["after"] for each in found] == ["saved", "saved"]
    assert [each["failure stays"] for each in found] == [failure, failure]


def test_of_two_failures_each_process_tells_its_own_and_the_first_counts(found):
    assert [each["both fail"] for each in found] == [
        ["ValueError", "rank 0 stumbled"],
        ["ValueError", "rank 1 stumbled"],
    ]
    last = [0, "MemoryLimitError: rank 0 has no memory", "INTACT"]
    assert [each["main fails"] for each in found] == [
        ["MemoryLimitError", "rank 0 has no memory"],
        ["PeerError", "process 0 of 2 failed: MemoryLimitError: rank 0 has no memory"],
    ]
    assert [each["last failure"] for each in found] == [last, last]


def test_a_process_that_is_gone_is_missed_at_once(found):
    for when in ("other gone", "other gone in an update"):
        kind, message = found[0][when]
        assert kind == "PeerError"
        assert message.startswith("process 0 of 2 ")
        assert "train.resume=auto" in message
    # Its own failure says more than that nobody hears of it.
    assert found[0]["other gone, and this one fails"] == ["ValueError", "rank 0 stumbled"]
