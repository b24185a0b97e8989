"""Drawing and scoring, with a decoder and terms that say what happens when."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from threading import Barrier
from typing import Any

import pytest
import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor, nn

from glm_grpo.config.sections import AdvantageSection
from glm_grpo.data.prompts import SparePrompts
from glm_grpo.errors import MemoryLimitError
from glm_grpo.grpo.credit import TokenPlaces, token_places
from glm_grpo.models.offload import Offload
from glm_grpo.models.reference import Reference
from glm_grpo.training.collate import join_experiences, join_tables
from glm_grpo.training.collect import collect
from glm_grpo.training.distributed.processes import ALONE, Processes
from glm_grpo.training.generate import decode, wait_for_scores
from glm_grpo.training.models import Models
from glm_grpo.training.phases import PhaseClock
from glm_grpo.types import Experience, ImageBatch, PromptBatch, Rollout
from rewards.refusals import Refusals
from rewards.score import Scorer, Term
from rewards.score_map import Grid
from rewards.types import Prompt, RewardError, RewardTable, Scores
from rewards.weighting import Mode
from tests.factories import (
    NoDecoder,
    NoPolicy,
    Watcher,
    advantage_settings,
    clipped_loss,
    tiny_config,
)

SOON = 20.0
"""Seconds after which a test gives up on a thread."""

PROMPTS = (Prompt("dog", "a dog"), Prompt("cat", "a cat"))


class SlowDecoder(NoDecoder):
    """Draws grey images, 10 and 20, 30 and 40, and lets a test look between two prompts."""

    def __init__(self, events: list[str], pause: Callable[[], None]) -> None:
        self._events, self._pause = events, pause

    def decode_groups(
        self, batch: PromptBatch, token_ids: Int64[Tensor, "P G T"]
    ) -> Iterator[UInt8[Tensor, "G 3 H W"]]:
        for row in range(len(batch.prompts)):
            self._events.append(f"draw {row}")
            levels = torch.tensor([20 * row + 10, 20 * row + 20], dtype=torch.uint8)
            yield levels[:, None, None, None].expand(-1, 3, 2, 2)
            self._pause()


class Brightness:
    """Writes down when it scores."""

    def __init__(self, events: list[str], *networks: nn.Module) -> None:
        self._events, self._networks = events, networks
        self.has_scored = threading.Event()

    def applies_to(self, prompt: Prompt) -> bool:
        return True

    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        self._events.append(f"score {prompts[0].prompt_id}")
        self.has_scored.set()
        return pixels.float().mean(dim=(1, 2, 3))

    def modules(self) -> tuple[nn.Module, ...]:
        return self._networks


class Part:
    """Writes down that it comes."""

    def __init__(self, name: str, events: list[str]) -> None:
        self._name, self._events = name, events

    def load(self) -> None:
        self._events.append(f"load {self._name}")

    def evict(self) -> None:
        self._events.append(f"evict {self._name}")


@pytest.fixture
def events() -> list[str]:
    return []


def draw(
    term: Brightness,
    events: list[str],
    *,
    pause: Callable[[], None] = lambda: None,
    parts: tuple[str, ...] = (),
    is_overlapping: bool = True,
    clock: PhaseClock | None = None,
    meanwhile: Callable[[], object] = lambda: None,
) -> tuple[ImageBatch, RewardTable]:
    models = Models(
        policy=NoPolicy(),
        decoder=SlowDecoder(events, pause),
        scorer=Scorer([Term("brightness", term, 1.0)], is_overlapping=is_overlapping),
        offload=Offload({name: Part(name, events) for name in parts}),
    )
    batch = PromptBatch(PROMPTS, 2, 32, 32, seed=0, decode_seeds=(5, 6))
    tokens = torch.zeros(2, 2, 3, dtype=torch.int64)
    clock = clock or PhaseClock()
    with decode(models, batch, tokens, clock) as decoded:
        meanwhile()
        return decoded.images, wait_for_scores(models, batch, decoded, clock)


def test_decode_and_score_returns_all_images_with_their_scores(events: list[str]) -> None:
    images, table = draw(Brightness(events), events)
    assert images.pixels.shape == (2, 2, 3, 2, 2)
    assert images.pixels[:, :, 0, 0, 0].tolist() == [[10, 20], [30, 40]]
    assert images.decode_seeds == (5, 6)
    assert table.raw.tolist() == [[[10.0], [20.0]], [[30.0], [40.0]]]


def test_decode_and_score_scores_a_prompt_while_the_next_is_drawn(events: list[str]) -> None:
    term = Brightness(events, nn.Linear(1, 1))
    in_time = []
    draw(term, events, pause=lambda: in_time.append(term.has_scored.wait(SOON)), parts=("decoder",))
    assert in_time == [True, True]
    drawing = [event for event in events if not event.startswith(("load", "evict"))]
    assert drawing[:3] == ["draw 0", "score dog", "draw 1"]


def test_decode_and_score_scores_after_the_last_image_where_nothing_may_overlap(
    events: list[str],
) -> None:
    draw(Brightness(events), events, is_overlapping=False)
    assert events == ["draw 0", "draw 1", "score dog", "score cat"]


def test_decode_leaves_time_for_other_work_before_scores_are_waited_for(events: list[str]) -> None:
    is_done = threading.Event()
    in_time = []

    class Judge(Brightness):
        def score(
            self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
        ) -> Float32[Tensor, " N"]:
            in_time.append(is_done.wait(SOON))
            return super().score(prompts, pixels)

    draw(Judge(events), events, meanwhile=is_done.set)
    assert in_time == [True, True]


def test_decode_and_score_lets_networks_wait_until_they_are_moved_in(events: list[str]) -> None:
    term = Brightness(events, nn.Linear(1, 1))
    is_early = []
    draw(
        term,
        events,
        pause=lambda: is_early.append(term.has_scored.wait(0.05)),
        parts=("decoder", "rewards"),
    )
    assert is_early == [False, False]
    assert events == [
        *("load decoder", "draw 0", "draw 1"),
        *("evict decoder", "load rewards", "score dog", "score cat"),
    ]


def test_decode_and_score_lets_terms_without_networks_begin_though_rewards_move(
    events: list[str],
) -> None:
    term = Brightness(events)
    in_time = []
    draw(
        term,
        events,
        pause=lambda: in_time.append(term.has_scored.wait(SOON)),
        parts=("decoder", "rewards"),
    )
    assert in_time == [True, True]
    assert events.index("score dog") < events.index("draw 1") < events.index("load rewards")


def test_decode_and_score_times_and_counts_drawing_and_waiting(events: list[str]) -> None:
    watcher = Watcher()
    clock = PhaseClock(watcher)
    draw(Brightness(events), events, clock=clock)
    assert watcher.phases == ["decode", "reward"]
    # Two prompts are drawn, and one term scores the images of each.
    assert watcher.counts == [
        ("decode", 1, 2),
        ("decode", 2, 2),
        ("reward", 1, 2),
        ("reward", 2, 2),
    ]
    assert set(clock.seconds()) == {"decode", "reward", "step"}


def test_decode_and_score_hands_on_what_failed(events: list[str]) -> None:
    class Picky(Brightness):
        def score(
            self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
        ) -> Float32[Tensor, " N"]:
            if prompts[0].prompt_id == "cat":
                raise ValueError("no cats")
            return super().score(prompts, pixels)

    with pytest.raises(RewardError, match="prompt cat, image 0: .*no cats") as caught:
        draw(Picky(events), events)
    assert caught.value.images is not None
    assert caught.value.images[:, 0, 0, 0].tolist() == [30, 40]


@pytest.mark.usefixtures("own_defaults")
@pytest.mark.parametrize("place", ["pause", "meanwhile"])
def test_decode_and_score_scores_no_further_group_once_it_failed(
    place: str, events: list[str]
) -> None:
    may_go_on = threading.Event()

    class Careless(Brightness):
        def score(
            self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
        ) -> Float32[Tensor, " N"]:
            torch.set_default_dtype(torch.float64)
            scores = super().score(prompts, pixels)
            assert may_go_on.wait(SOON)
            return scores

    term = Careless(events)

    def fail() -> None:
        if "draw 1" in events:
            assert term.has_scored.wait(SOON)
            raise MemoryError

    before = set(threading.enumerate())
    with pytest.raises(MemoryLimitError if place == "pause" else MemoryError):
        draw(term, events, **{place: fail})
    assert torch.get_default_dtype() == torch.float32
    may_go_on.set()
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(SOON)
    assert sorted(events) == ["draw 0", "draw 1", "score dog"]


class EqualReference(Reference):
    """A reference that the policy has not left."""

    def equals_policy(self) -> bool:
        return True


class RoundCounter(NoPolicy):
    """Tokens are all the number of the call that sampled them."""

    def __init__(self, *, is_reference: bool = False) -> None:
        self._calls = 0
        self.reference = EqualReference() if is_reference else Reference()

    def token_places(self, batch: PromptBatch) -> TokenPlaces:
        return token_places((Grid(1, 3),), Grid(1, 3))

    def sample(self, batch: PromptBatch, **others: Any) -> Rollout:
        token_ids = torch.full((len(batch.prompts), batch.group_size, 3), self._calls)
        mask = torch.ones(*token_ids.shape, self.codebook_size, dtype=torch.bool)
        self._calls += 1
        return Rollout(token_ids, -token_ids.float(), mask)

    def reference_log_probs(
        self, batch: PromptBatch, rollout: Rollout, rows: Int64[Tensor, " N"]
    ) -> Float32[Tensor, "N T"]:
        """Lower than those sampled: by a quarter in the first image, by two in the second, ..."""
        return rollout.log_probs.flatten(0, 1)[rows] - 0.25 * (rows[:, None] + 1)


class FlatOrRising(NoDecoder):
    """Images of grey 10 and 20, or twice 30, or 10 and 50, where the prompt says so."""

    def decode_groups(
        self, batch: PromptBatch, token_ids: Int64[Tensor, "P G T"]
    ) -> Iterator[UInt8[Tensor, "G 3 H W"]]:
        for prompt in batch.prompts:
            levels = {"flat": [30, 30], "steep": [10, 50]}.get(prompt.prompt, [10, 20])
            grey = torch.tensor(levels, dtype=torch.uint8)
            yield grey[:, None, None, None].expand(-1, 3, 2, 2)


class Listed(list[Prompt]):
    """A source of prompts."""

    path, height, width = "listed", 32, 32

    def ids(self) -> list[str]:
        return [prompt.prompt_id for prompt in self]

    def origins(self) -> list[str]:
        return ["listed"] * len(self)

    def captions(self) -> list[str]:
        return [prompt.prompt for prompt in self]

    def texts(self) -> list[tuple[str, ...]]:
        return [prompt.texts for prompt in self]

    def metadata(self) -> list[Mapping[str, Any]]:
        return [prompt.metadata for prompt in self]

    def identities(self) -> list[Hashable]:
        return [*self.captions()]

    def digests(self) -> dict[str, str]:
        return {}

    def has_targets(self) -> bool:
        return any(prompt.target is not None for prompt in self)


class Threaded(Processes):
    """One of two, each in a thread of its own."""

    def __init__(self, rank: int, barrier: Barrier, values: list[Any]) -> None:
        super().__init__(rank=rank, count=2)
        self._barrier, self._values = barrier, values

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(SOON)
        found = [*self._values]
        self._barrier.wait(SOON)
        return found

    def together(self) -> nullcontext[None]:
        return nullcontext()


class SecondOfTwo(Processes):
    """Of which the first has as many zero-std groups and the same rewards."""

    def __init__(self) -> None:
        super().__init__(rank=1, count=2)

    def gather(self, value: Any) -> list[Any]:
        return [value, value]

    def together(self) -> nullcontext[None]:
        return nullcontext()


def collected(
    spares: Sequence[str] = (),
    *,
    rounds: int = 0,
    processes: Processes = ALONE,
    is_reference: bool = False,
    term: Brightness | None = None,
    advantage: AdvantageSection | None = None,
    combine: Mode = "weighted_sum",
    own: slice = slice(None),
    offload: Offload | None = None,
    **loss: Any,
) -> Experience:
    """Of a step whose first group is flat and whose second is not."""
    models = Models(
        policy=RoundCounter(is_reference=is_reference),
        decoder=FlatOrRising(),
        scorer=Scorer([Term("brightness", term or Brightness([]), 1.0)]),
        offload=offload or Offload({}),
    )
    config = tiny_config(
        f"rollout.dynamic_sampling_rounds={rounds}",
        "train.micro_batch_size=3",
        "decode.steps=1",
        f"reward.combine={combine}",
        advantage=advantage or advantage_settings(),
        loss=clipped_loss(**loss),
    )
    prompts = (Prompt("first", "flat"), Prompt("second", "rising"))[own]
    listed = Listed(Prompt(f"spare {row}", kind) for row, kind in enumerate(spares))
    return collect(
        models,
        PromptBatch(prompts, 2, 32, 32, seed=0, decode_seeds=(5, 6)[own]),
        config,
        clock=PhaseClock(),
        processes=processes,
        spares=SparePrompts(listed, tuple(range(len(listed))), step=4, seed=0, group_size=2),
    )


def test_collect_reads_no_reference_where_no_divergence_is_weighed() -> None:
    experience = collected()
    assert experience.reference_log_probs is None
    assert experience.penalties.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_collect_reads_the_reference_where_a_divergence_is_weighed(placement: str) -> None:
    experience = collected(kl_coef=0.5, kl_placement=placement)
    assert experience.reference_log_probs is not None
    assert experience.reference_log_probs[:, :, 0].tolist() == [[-0.25, -0.5], [-0.75, -1.0]]
    # Half of the sum over three tokens.
    penalties = [[0.375, 0.75], [1.125, 1.5]] if placement == "reward" else [[0, 0], [0, 0]]
    assert experience.penalties.tolist() == penalties
    # Rewards of 30 and 30 that the penalty makes differ: the first image is the better one.
    first = experience.advantages[0, 0].item()
    assert first == (pytest.approx(0.5**0.5, rel=0.1) if placement == "reward" else 0)


def test_collect_reads_the_reference_after_the_scores_if_the_policy_has_to_be_moved(
    events: list[str],
) -> None:
    offload = Offload({name: Part(name, events) for name in ("policy", "rewards")})
    experience = collected(kl_coef=0.5, offload=offload)
    assert experience.reference_log_probs.equal(collected(kl_coef=0.5).reference_log_probs)
    moves = ["load policy", "evict policy", "load rewards", "evict rewards", "load policy"]
    assert events == moves


class Placed(Brightness):
    """Says that everything was earned at the left."""

    def score_with_map(self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]) -> Scores:
        values = self.score(prompts, pixels)
        parts = torch.zeros(len(prompts), 1, 3)
        parts[:, 0, 0] = values
        return Scores(values, score_map=parts)


def test_collect_gives_tokens_credit_for_what_they_drew() -> None:
    advantage = advantage_settings(credit="place", reward_to_go=0.0, normalization="mean_only")
    experience = collected(advantage=advantage, term=Placed([]))
    tokens = experience.advantages
    assert tokens.shape == (2, 2, 3)
    assert tokens[0].count_nonzero() == 0
    # Three tokens of which the first alone draws the place that differs: by 10 levels on either
    # side, as large over all tokens as the images' advantages are.
    expected = torch.tensor([[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]) * 5 * 3**0.5
    torch.testing.assert_close(tokens[1], expected)
    assert collected(term=Placed([])).advantages.shape == (2, 2, 1)


@pytest.mark.parametrize("normalization", ["group_std", "batch_std"])
@pytest.mark.parametrize("combine", ["weighted_sum", "normalize_then_sum"])
def test_two_processes_that_refill_give_the_credit_that_one_gives(
    normalization: str, combine: Mode
) -> None:
    advantage = advantage_settings(credit="place", normalization=normalization)
    step = partial(
        collected, ("steep",), rounds=1, advantage=advantage, term=Placed([]), combine=combine
    )
    alone = step()
    barrier, values = Barrier(2), [None, None]
    with ThreadPoolExecutor(2) as threads:
        own = [slice(0, 1), slice(1, 2)]
        both = [Threaded(rank, barrier, values) for rank in range(2)]
        parts = [*threads.map(lambda rows, each: step(own=rows, processes=each), own, both)]
    whole = join_experiences(parts)
    ids, ids_alone = ([each.prompt_id for each in x.prompts.prompts] for x in (whole, alone))
    assert ids == ["first", "spare 0", "second"]
    order = [ids_alone.index(each) for each in ids]
    torch.testing.assert_close(whole.advantages, alone.advantages[order])
    assert whole.place_credit is not None
    assert alone.place_credit is not None
    assert whole.place_credit.equal(alone.place_credit[order])
    assert whole.is_learned_from().tolist() == [[False] * 2, [True] * 2, [True] * 2]


def test_a_policy_that_is_the_reference_loses_no_reward_to_rounding() -> None:
    experience = collected(is_reference=True, kl_coef=0.5, kl_placement="reward")
    assert experience.is_sampled_by_reference
    assert experience.penalties.tolist() == [[0, 0], [0, 0]]
    assert experience.is_zero_std().tolist() == [True, False]


@pytest.mark.parametrize(
    ("spares", "rounds", "trained", "sampled"),
    [
        # The first spare is as flat, so the next takes its place.
        (("flat", "rising", "rising"), 5, [3, 1], ["spare 0", "spare 1"]),
        (("rising", "rising"), 5, [2, 1], ["spare 0"]),
        # One round replaces once, whatever comes of it.
        (("flat", "rising"), 1, [2, 1], ["spare 0"]),
        (("flat",), 5, [2, 1], ["spare 0"]),
        ((), 5, [0, 1], []),
        (("rising",), 0, [0, 1], []),
    ],
)
def test_collect_replaces_flat_groups_by_spare_prompts_in_their_order(
    spares: tuple[str, ...], rounds: int, trained: list[int], sampled: list[str]
) -> None:
    experience = collected(spares, rounds=rounds)
    assert experience.trained_groups().tolist() == trained
    ids = [prompt.prompt_id for prompt in experience.prompts.prompts]
    assert ids == ["first", "second", *sampled]


def test_collect_keeps_all_of_every_round() -> None:
    experience = collected(("flat", "rising"), rounds=2)
    assert experience.totals.tolist() == [[30, 30], [10, 20], [30, 30], [10, 20]]
    # Deviations of 5 over their sample standard deviation of sqrt(50).
    expected = [0.0, -(0.5**0.5), 0.0, -(0.5**0.5)]
    assert experience.advantages[:, 0, 0].tolist() == pytest.approx(expected)
    assert experience.is_zero_std().tolist() == [True, False, True, False]
    assert experience.images.pixels[:, 0, 0, 0, 0].tolist() == [30, 10, 30, 10]
    assert experience.scores.raw[:, 1, 0].tolist() == [30, 20, 30, 20]
    # Two groups were sampled by the first call, one by each later one.
    assert experience.rollout.token_ids[:, 0, 0].tolist() == [0, 0, 1, 2]
    assert experience.rollout.log_probs[:, 1, 2].tolist() == [0, 0, -1, -2]
    assert experience.rollout.sampling_mask is not None
    assert experience.rollout.sampling_mask.shape == (4, 2, 3, 16)
    assert experience.prompts.decode_seeds == experience.images.decode_seeds
    assert experience.prompts.decode_seeds[:2] == (5, 6)


class Refusing(Brightness):
    """Refuses images of some greys."""

    def __init__(self, *levels: float) -> None:
        super().__init__([])
        self._levels = levels

    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> list[float | None]:
        found = super().score(prompts, pixels).tolist()
        return [None if level in self._levels else level for level in found]


def test_a_group_with_a_single_image_left_is_flat_and_replaced() -> None:
    # Two of the eight images of all rounds.
    experience = collected(("rising", "flat"), rounds=2, term=Refusing(10.0))
    assert experience.totals.isnan().sum() == 2
    assert experience.is_zero_std().tolist() == [True] * 4
    assert experience.advantages.count_nonzero() == 0


class MainOfTwo(SecondOfTwo):
    """The other one refused nothing, or the same."""

    def __init__(self, *, is_same: bool) -> None:
        super().__init__()
        self.rank, self._is_same = 0, is_same

    def gather(self, value: Any) -> list[Any]:
        if self._is_same or not isinstance(value, tuple) or not isinstance(value[0], Refusals):
            return [value, value]
        return [value, tuple(replace(each, count=0, first="") for each in value)]


def test_refused_images_are_counted_over_all_processes() -> None:
    term = Refusing(30.0)
    # Two of four images here.
    assert collected(processes=MainOfTwo(is_same=False), term=term).totals.isnan().sum() == 2
    with pytest.raises(RewardError, match="brightness .*4 of 8 images: prompt first"):
        collected(processes=MainOfTwo(is_same=True), term=term)


def test_collect_leaves_spare_prompts_to_processes_before_it() -> None:
    experience = collected(("rising", "rising"), rounds=1, processes=SecondOfTwo())
    ids = [prompt.prompt_id for prompt in experience.prompts.prompts]
    assert ids == ["first", "second", "spare 1"]
    # One is left, and the process before it takes that.
    assert collected(("rising",), rounds=1, processes=SecondOfTwo()).trained_groups().tolist() == [
        0,
        1,
    ]


def test_joined_tables_keep_what_was_found_in_the_images_of_either() -> None:
    table = collected().scores
    dogs = ((("dog",), ()), ())
    found = replace(table, objects={"brightness": dogs})
    assert join_tables([table, found]).objects == {"brightness": ((), (), *dogs)}


def test_joined_experiences_keep_what_places_earned() -> None:
    advantage = advantage_settings(credit="place")
    whole = join_experiences([collected(advantage=advantage, term=Placed([]))] * 2)
    # The second group differs by 10 levels at the left; the first is flat.
    right = [0.0, 0.0]
    group = [[[-5.0, *right]], [[5.0, *right]]]
    assert whole.place_credit is not None
    assert whole.place_credit.tolist() == [[[[0.0, *right]]] * 2, group] * 2
