"""The source between a learner and collectors that finish, fail and die as the test says."""

from __future__ import annotations

import itertools
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from glm_grpo.collectors.collector_pool import (
    Collected,
    Died,
    Event,
    Finished,
    Order,
    Ready,
    Unusable,
)
from glm_grpo.collectors.source import (
    MAX_DEATHS_IN_A_ROW,
    PATIENCE_SECONDS,
    AsynchronousSource,
)
from glm_grpo.errors import CollectorError, MemoryLimitError
from glm_grpo.models.offload import Offload
from glm_grpo.training.models import Models
from glm_grpo.training.phases import PhaseClock
from glm_grpo.types import Experience, ImageBatch, PromptBatch, Rollout
from rewards.score import Scorer, Term
from rewards.types import Prompt, RewardError, RewardTable
from tests.factories import NoDecoder, NoPolicy, tiny_config

TOKENS = 4


class CountingPolicy(NoPolicy):
    """Its weight is the number of updates it has had."""

    def __init__(self) -> None:
        self.updates = 0

    def state_tensors(self) -> dict[str, Tensor]:
        return {"updates": torch.tensor([float(self.updates)])}


class Nothing:
    """A term that is never asked."""

    def applies_to(self, prompt: Prompt) -> bool:
        return True

    def score(self, prompts: Sequence[Prompt], pixels: Tensor) -> Tensor:
        raise NotImplementedError

    def modules(self) -> tuple[torch.nn.Module, ...]:
        return ()


def batch_for_step(step: int) -> PromptBatch:
    return PromptBatch((Prompt(f"prompt-{step}", "a sign"),), 2, 32, 32, step, (step,))


def experience_of(order: Order, updates: float) -> Experience:
    """As a policy of so many updates samples it: log-probs of -0.1 times that."""
    pixels = torch.zeros(1, 2, 3, 1, 1, dtype=torch.uint8)
    return Experience(
        prompts=order.batch,
        rollout=Rollout(
            token_ids=torch.zeros(1, 2, TOKENS, dtype=torch.int64),
            log_probs=torch.full((1, 2, TOKENS), -0.1 * updates),
            sampling_mask=None,
        ),
        images=ImageBatch(pixels, order.batch.decode_seeds),
        scores=RewardTable(
            names=("only",),
            raw=torch.zeros(1, 2, 1),
            is_applicable=torch.ones(1, 1, dtype=torch.bool),
            weights=torch.ones(1),
            std_floors=torch.ones(1),
        ),
        totals=torch.zeros(1, 2),
        penalties=torch.zeros(1, 2),
        advantages=torch.zeros(1, 2, 1),
    )


class FakePool:
    """Collectors that finish in random order; `fate` may have an order end otherwise."""

    def __init__(
        self, size: int, fate: Callable[[int, Order], Event | None], seed: int, late: int = 0
    ) -> None:
        self._fate = fate
        self._draws = random.Random(seed)
        self._lock = threading.Lock()
        self._events: list[Event] = [Ready(index) for index in range(size - late)]
        self._late: list[Event] = [Ready(index) for index in range(size - late, size)]
        self.weights: dict[int, float] = {}
        self.pushed: list[int] = []
        self.orders: list[Order] = []
        self.replaced: list[int] = []
        self.is_closed = False

    def start_late_ones(self) -> None:
        with self._lock:
            self._events += self._late

    def push(self, policy_updates: int, weights: Mapping[str, Tensor]) -> None:
        self.weights[policy_updates] = weights["updates"].item()
        self.pushed.append(policy_updates)

    def forget_before(self, policy_updates: int) -> None:
        self.weights = {old: x for old, x in self.weights.items() if old >= policy_updates}

    def submit(self, collector: int, order: Order) -> None:
        event = self._fate(collector, order)
        if event is None:
            experience = experience_of(order, self.weights[order.policy_updates])
            collected = Collected(experience, {"rollout": 2.0, "decode": 1.0})
            event = Finished(collector, order.number, collected)
        with self._lock:
            self.orders.append(order)
            self._events.append(event)

    def wait(self, seconds: float) -> Sequence[Event]:
        with self._lock:
            if self._events:
                return [self._events.pop(self._draws.randrange(len(self._events)))]
        time.sleep(0.001)
        return []

    def replace(self, collector: int) -> None:
        with self._lock:
            self.replaced.append(collector)
            self._events.append(Ready(collector))

    def close(self) -> None:
        self.is_closed = True


class Run:
    """A learner that learns one update a step from a source."""

    def __init__(
        self,
        *,
        collectors: int = 2,
        age: int = 1,
        last: int = 6,
        push_every: int = 1,
        fate: Callable[[int, Order], Event | None] = lambda *_: None,
        seed: int = 0,
        late: int = 0,
        now: Callable[[], float] = time.perf_counter,
        options: Sequence[str] = (),
    ) -> None:
        self.policy = CountingPolicy()
        self.pool = FakePool(collectors, fate, seed, late)
        self.metrics: list[dict[str, float]] = []
        self.clock = PhaseClock()
        config = tiny_config(
            f"train.steps={last}",
            "train.mode=async",
            f"async.collectors={collectors}",
            f"async.max_policy_age={age}",
            f"async.push_every={push_every}",
            "train.micro_batch_size=1",
            *options,
        )
        scorer = Scorer([Term("only", Nothing(), 1.0)])
        models = Models(self.policy, NoDecoder(), scorer, Offload({}))
        self.source = AsynchronousSource(
            self.pool, models, config, batch_for_step, first_step=1, now=now
        )
        self._last = last

    def learn(self, step: int) -> Experience:
        self.clock = PhaseClock()
        experience, metrics = self.source.next_experience(step, self.clock)
        age = self.policy.updates - round(-10 * experience.rollout.log_probs.mean().item())
        assert metrics["async/policy_age"] == age
        self.metrics.append(dict(metrics))
        self.policy.updates += 1
        self.source.policy_updated(step)
        return experience

    def learn_all(self) -> list[Experience]:
        return [self.learn(step) for step in range(1, self._last + 1)]


@pytest.fixture
def run() -> Iterator[Callable[..., Run]]:
    """Builds runs, and closes them."""
    runs: list[Run] = []

    def build(**options: object) -> Run:
        runs.append(Run(**options))
        return runs[-1]

    yield build
    for each in runs:
        if not each.pool.is_closed:
            each.source.close()


def prompts_of(experiences: Sequence[Experience]) -> list[str]:
    return [experience.prompts.prompts[0].prompt_id for experience in experiences]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("collectors", "age"), [(1, 0), (1, 3), (3, 2)])
def test_steps_come_once_and_in_order_whoever_finishes_first(
    run: Callable[..., Run], collectors: int, age: int, seed: int
) -> None:
    it = run(collectors=collectors, age=age, last=9, seed=seed)

    experiences = it.learn_all()

    assert prompts_of(experiences) == [f"prompt-{step}" for step in range(1, 10)]
    assert [order.number for order in it.pool.orders] == list(range(1, 10))
    assert all(0 <= figures["async/policy_age"] <= age for figures in it.metrics)


@pytest.mark.parametrize("seed", range(4))
def test_with_a_collector_for_every_batch_ages_do_not_depend_on_time(
    run: Callable[..., Run], seed: int
) -> None:
    deaths = DiesAt(2 + seed % 4, times=seed % 3)
    it = run(collectors=3, age=2, last=6, seed=seed, fate=deaths, late=seed % 3)
    for step in range(1, 7):
        it.learn(step)
        if step == 1 + seed % 4:
            it.pool.start_late_ones()
    assert [figures["async/policy_age"] for figures in it.metrics] == [0, 1, 2, 2, 2, 2]


def test_at_age_0_every_batch_is_made_with_the_newest_weights_and_left_as_it_is(
    run: Callable[..., Run],
) -> None:
    it = run(collectors=1, age=0, last=4)

    experiences = it.learn_all()

    assert [order.policy_updates for order in it.pool.orders] == [0, 1, 2, 3]
    assert not any(experience.is_stale for experience in experiences)


def test_only_what_an_older_policy_sampled_is_stale(run: Callable[..., Run]) -> None:
    it = run(collectors=2, age=1, last=3)
    assert [experience.is_stale for experience in it.learn_all()] == [
        figures["async/policy_age"] > 0 for figures in it.metrics
    ]
    assert it.metrics[1]["async/policy_age"] == 1


@pytest.mark.parametrize(("push_every", "expected"), [(1, [0, 1, 2, 3]), (3, [0, 3])])
def test_weights_are_pushed_every_so_many_updates(
    run: Callable[..., Run], push_every: int, expected: list[int]
) -> None:
    it = run(collectors=2, age=3, last=4, push_every=push_every)

    it.learn_all()

    # Of the last step nobody needs them.
    assert it.pool.pushed == expected
    assert {order.policy_updates for order in it.pool.orders} <= set(expected)


def test_weights_that_no_batch_needs_are_forgotten(run: Callable[..., Run]) -> None:
    it = run(collectors=2, age=1, last=9)
    it.learn_all()
    assert min(it.pool.weights) >= 7


def test_seconds_of_the_collector_are_those_of_its_phases(run: Callable[..., Run]) -> None:
    it = run()
    it.learn(1)
    assert it.clock.seconds()["rollout"] == 2.0
    assert it.clock.seconds()["decode"] == 1.0


def test_metrics_of_the_source_are_documented(run: Callable[..., Run]) -> None:
    it = run(last=2)
    it.learn_all()
    text = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
    documented = re.findall(r"^\| `(async/[a-z_]+)` \|", text, flags=re.MULTILINE)
    assert set(documented) == set(it.metrics[-1])


def test_waiting_is_counted_on_either_side(run: Callable[..., Run]) -> None:
    it = run(collectors=2, age=1)
    it.learn(1)
    # Batch 2 is made, batch 3 is on its way; collectors idle while the learner is slow.
    time.sleep(0.2)
    it.learn(2)
    it.learn(3)
    assert it.metrics[1]["async/wait_collectors_seconds"] >= 0.15
    assert it.metrics[1]["async/wait_learner_seconds"] < 0.1
    assert it.metrics[1]["async/queue_length"] == 1  # batch 3 waits beside
    assert it.metrics[0]["async/wait_learner_seconds"] >= 0


class DiesAt:
    """The collector that gets the order of a step dies, so many times."""

    def __init__(self, step: int, times: int) -> None:
        self._step, self._left = step, times

    def __call__(self, collector: int, order: Order) -> Event | None:
        if order.batch.seed != self._step or self._left == 0:
            return None
        self._left -= 1
        return Died(collector, f"collector {collector} (process 7 on here) died (killed)")


@pytest.mark.parametrize("seed", range(2))
def test_a_collector_that_dies_is_replaced_and_its_batch_made_again_as_it_was(
    run: Callable[..., Run], seed: int
) -> None:
    it = run(fate=DiesAt(3, times=2), seed=seed)

    experiences = it.learn_all()

    assert prompts_of(experiences) == [f"prompt-{step}" for step in range(1, 7)]
    assert len(it.pool.replaced) == 2
    assert sum(figures["async/restarts"] for figures in it.metrics) == 2
    lost = [order for order in it.pool.orders if order.batch.seed == 3]
    assert len(lost) == 3
    assert {order.policy_updates for order in lost} == {1}


def test_collectors_that_die_again_and_again_stop_the_run(run: Callable[..., Run]) -> None:
    it = run(fate=DiesAt(3, times=MAX_DEATHS_IN_A_ROW))
    it.learn(1)
    it.learn(2)
    with pytest.raises(CollectorError, match=r"3 collectors died in a row.*process 7 on here"):
        it.learn(3)


def failing(step: int, error: Exception) -> Callable[[int, Order], Event | None]:
    def fate(collector: int, order: Order) -> Event | None:
        if order.batch.seed == step:
            return Finished(collector, order.number, error)
        return None

    return fate


def test_an_error_is_raised_where_its_step_is_taken_with_its_images(
    run: Callable[..., Run],
) -> None:
    images = torch.zeros(2, 3, 1, 1, dtype=torch.uint8)
    error = RewardError("term only, prompt prompt-1: gone", images=images)
    it = run(fate=failing(2, error))

    # The step before it is trained on, though the error is known by then.
    it.learn(1)
    with pytest.raises(RewardError) as caught:
        it.learn(2)

    assert caught.value is error
    assert caught.value.images is images


def test_a_collector_that_cannot_be_set_up_stops_the_run(run: Callable[..., Run]) -> None:
    error = MemoryLimitError("collector 0 (process 7 on here): out of memory")
    it = run(fate=lambda collector, _: Unusable(collector, error))
    with pytest.raises(MemoryLimitError, match="collector 0"):
        it.learn(1)


def test_what_fails_in_the_thread_reaches_the_learner(run: Callable[..., Run]) -> None:
    def break_down(collector: int, order: Order) -> Event | None:
        raise ConnectionError("the cluster is gone")

    it = run(fate=break_down)
    with pytest.raises(ConnectionError, match="the cluster is gone"):
        it.learn(1)


def test_closing_ends_thread_and_pool(run: Callable[..., Run]) -> None:
    it = run()
    it.learn(1)
    it.source.close()
    assert it.pool.is_closed
    assert "collectors" not in {thread.name for thread in threading.enumerate()}


def test_collectors_that_find_no_place_are_told_of_once(
    run: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    seconds = itertools.count(0.0, PATIENCE_SECONDS / 3)
    it = run(collectors=1, age=0, last=1, late=1, now=lambda: next(seconds))
    learner = threading.Thread(target=it.learn, args=(1,))
    learner.start()
    while "no collector is ready" not in caplog.text:
        time.sleep(0.01)
    it.pool.start_late_ones()
    learner.join()
    assert caplog.text.count("no collector is ready") == 1
    assert "ray status" in caplog.text
