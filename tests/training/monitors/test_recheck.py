"""The recheck of rollouts, with a decoder that draws other greys when it takes fewer steps."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence

import pytest
import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor, nn

from glm_grpo.models.offload import Offload
from glm_grpo.training.distributed.processes import Processes
from glm_grpo.training.generate import decode_and_score
from glm_grpo.training.models import Models
from glm_grpo.training.monitors.recheck import recheck_decode
from glm_grpo.training.phases import PhaseClock
from glm_grpo.types import Experience, PromptBatch, Rollout
from rewards.score import Scorer, Term
from rewards.types import Prompt
from tests.factories import NoDecoder, NoPolicy, Watcher, tiny_config

FULL, CHEAP = 4, 1
Greys = list[list[int]]
LEVELS: Greys = [[10, 20, 30], [10, 20, 30], [10, 20, 30]]
"""Of three prompts with three images each, decoded in full."""
TURNED: Greys = [[10, 20, 30], [10, 30, 20], [30, 20, 10]]
"""In ranks: as in full, one pair of neighbours swapped (0.5), the other way round (-1)."""


class GreyDecoder(NoDecoder):
    """Draws grey images by number of steps, and writes down which prompts it draws how."""

    def __init__(self, greys: dict[int, Greys]) -> None:
        self.steps = FULL
        self.greys = greys
        self.drawn: list[tuple[int, str]] = []

    def decode_groups(
        self, batch: PromptBatch, token_ids: Int64[Tensor, "P G T"]
    ) -> Iterator[UInt8[Tensor, "G 3 H W"]]:
        for prompt, tokens in zip(batch.prompts, token_ids, strict=True):
            self.drawn.append((self.steps, prompt.prompt_id))
            row = self.greys[self.steps][int(prompt.prompt_id)]
            levels = torch.tensor([row[token] for token in tokens[:, 0].tolist()])
            yield levels.to(torch.uint8)[:, None, None, None].expand(-1, 3, 2, 2)


class Brightness:
    """Scores by grey level."""

    def applies_to(self, prompt: Prompt) -> bool:
        return True

    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        return pixels.float().mean(dim=(1, 2, 3))

    def modules(self) -> tuple[nn.Module, ...]:
        return ()


def silent() -> PhaseClock:
    return PhaseClock()


class Run:
    """Steps of a run whose policy does not change."""

    def __init__(
        self,
        cheap: Greys = TURNED,
        full: Greys = LEVELS,
        *,
        every: int = 2,
        groups: int = 2,
        least: float = 0.0,
        decode_steps: int = CHEAP,
    ) -> None:
        self.decoder = GreyDecoder({CHEAP: cheap, FULL: full})
        self.models = Models(
            policy=NoPolicy(),
            decoder=self.decoder,
            scorer=Scorer([Term("brightness", Brightness(), 1.0)]),
            offload=Offload({}),
        )
        self.config = tiny_config(
            "reward.combine=weighted_sum",
            f"decode.steps={FULL}",
            f"decode.rollout_steps={decode_steps}",
            f"decode.recheck_every={every}",
            f"decode.recheck_groups={groups}",
            f"decode.min_rank_correlation={least}",
        )
        self.decode_steps = decode_steps

    def step(self, step: int, clock: PhaseClock | None = None) -> dict[str, float]:
        """Draws and scores as the step would, and rechecks."""
        prompts = tuple(Prompt(str(row), "grey") for row in range(3))
        batch = PromptBatch(prompts, 3, 32, 32, seed=0, decode_seeds=(5, 6, 7))
        # The first token says which of the greys of its prompt an image gets.
        tokens = torch.arange(3)[None, :, None].expand(3, 3, 2).contiguous()
        models = self.models.with_decode_steps(self.decode_steps)
        images, table = decode_and_score(models, batch, tokens, silent())
        self.decoder.drawn.clear()
        experience = Experience(
            prompts=batch,
            rollout=Rollout(tokens, torch.zeros(3, 3, 2), sampling_mask=None),
            images=images,
            scores=table,
            totals=table.raw[..., 0],
            penalties=torch.zeros(3, 3),
            advantages=torch.zeros(3, 3, 1),
        )
        return recheck_decode(
            self.models, experience, step, self.config, clock or silent(), Processes()
        )


def test_recheck_compares_the_first_groups_with_their_full_decode() -> None:
    run = Run(groups=2)
    # The mean of 1 and 0.5.
    assert run.step(1) == pytest.approx(
        {
            "decode/rank_correlation/brightness": 0.75,
            "decode/rank_correlation/total": 0.75,
        }
    )
    assert run.decoder.drawn == [(FULL, "0"), (FULL, "1")]


def test_recheck_comes_at_the_first_step_and_every_so_many() -> None:
    run = Run(every=3)
    rechecked = [step for step in range(1, 9) if run.step(step)]
    assert rechecked == [1, 4, 7]
    assert run.step(2) == {}
    assert run.decoder.drawn == []


def test_recheck_says_and_draws_nothing_where_rollouts_are_decoded_in_full() -> None:
    run = Run(decode_steps=FULL, least=1.0)
    assert run.step(1) == {}
    assert run.decoder.drawn == []


def test_recheck_warns_below_the_bound(caplog: pytest.LogCaptureFixture) -> None:
    # The mean of 1, 0.5 and -1.
    run = Run(every=1, groups=3, least=0.2)
    with caplog.at_level(logging.WARNING):
        assert run.step(5)["decode/rank_correlation/total"] == pytest.approx(1 / 6)
    (warning,) = (record.getMessage() for record in caplog.records)
    said = r"step 5: decode\.rollout_steps=1 .*0\.167.* decode\.min_rank_correlation=0\.200"
    assert re.search(said, warning)


@pytest.mark.parametrize(
    ("cheap", "full", "found", "is_warned"),
    [
        ([[10, 30, 20]] * 3, LEVELS, 0.5, False),
        # No group has an order: no evidence against the cheap decode.
        ([[10, 10, 10]] * 3, [[10, 10, 10]] * 3, math.nan, False),
        # The cheap decode shows no order.
        ([[10, 10, 10]] * 3, LEVELS, 0.0, True),
    ],
)
def test_recheck_warns_of_evidence_alone(
    cheap: Greys, full: Greys, found: float, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    correlation = Run(cheap, full, least=0.5).step(1)["decode/rank_correlation/total"]
    assert correlation == pytest.approx(found, nan_ok=True)
    assert bool(caplog.records) == is_warned


def test_recheck_has_a_time_of_its_own() -> None:
    watcher = Watcher()
    clock = PhaseClock(watcher)
    Run().step(1, clock)
    assert watcher.phases == ["recheck"]
    assert set(clock.seconds()) == {"recheck", "step"}
