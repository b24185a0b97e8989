import gc
import re
import weakref

import pytest
import torch

from glm_grpo.errors import MemoryLimitError
from glm_grpo.training.out_of_memory import (
    describe_decoding,
    describe_replay,
    describe_sampling,
    out_of_memory_explained,
)
from glm_grpo.types import PromptBatch
from rewards.types import Prompt, RewardError
from tests.factories import NoPolicy

# 4 bytes a number.
FAR_TOO_MUCH = 10**15


@pytest.fixture
def batch():
    prompts = (Prompt("a", "one"), Prompt("b", "two"))
    return PromptBatch(prompts, 3, 1024, 512, seed=0, decode_seeds=(0, 1))


def test_an_error_of_memory_is_explained_by_phase_size_and_keys(batch):
    with (
        pytest.raises(MemoryLimitError) as caught,
        out_of_memory_explained("update", describe_replay(batch, NoPolicy(), 2)),
    ):
        torch.empty(FAR_TOO_MUCH)
    size = ("update phase", "2 of 6 images", "512 tokens", r"4000000\.00 GB")
    first = ("train.micro_batch_size", "model.gradient_checkpointing=true", "offload=modules_and_")
    later = (r"'model\.adapter={rank: 32, alpha: 64\.0}'", "rollout.height", "rollout.width")
    said = ".*".join((*size, *first, *later, "`glm-grpo plan`"))
    assert re.search(said, str(caught.value))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_work_is_described_by_the_sizes_a_phase_works_on(batch):
    # Prompts, images of each, height, width and tokens.
    assert numbers_in(describe_sampling(batch, NoPolicy())) == [2, 3, 1024, 512, 512]
    assert numbers_in(describe_decoding(batch)) == [3, 1024, 512]
    assert numbers_in(describe_replay(batch, NoPolicy(), 100)) == [6, 6, 512]


def numbers_in(text):
    return [int(found) for found in re.findall(r"\d+", text)]


def test_where_nothing_is_said_of_bytes_none_are_named():
    with (
        pytest.raises(MemoryLimitError, match="records phase: images") as caught,
        out_of_memory_explained("records", "images"),
    ):
        raise MemoryError
    assert "GB" not in str(caught.value)


def test_what_was_explained_inside_goes_through():
    with (
        pytest.raises(MemoryLimitError, match="decode phase: inner"),
        out_of_memory_explained("records", "outer"),
        out_of_memory_explained("decode", "inner"),
    ):
        raise MemoryError


def test_other_errors_go_through_unchanged():
    with (
        pytest.raises(RuntimeError, match="mat1 and mat2") as caught,
        out_of_memory_explained("decode", "images"),
    ):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert type(caught.value) is RuntimeError


def test_what_the_failed_phase_held_is_given_back_before_the_error_is_handled():
    held = []

    def fill_memory():
        activations = torch.ones(10)
        held.append(weakref.ref(activations))
        torch.empty(FAR_TOO_MUCH)

    # The error is alive here, as where what was learned is saved.
    with pytest.raises(MemoryLimitError) as caught, out_of_memory_explained("update", "images"):
        fill_memory()
    gc.collect()
    assert caught.value.__cause__ is not None
    assert held[0]() is None


def test_a_term_that_ran_out_of_memory_keeps_its_own_words() -> None:
    said = "term hps, prompt dog: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    with pytest.raises(RewardError) as caught, out_of_memory_explained("reward", "a group"):
        raise RewardError(said)
    assert str(caught.value) == said
