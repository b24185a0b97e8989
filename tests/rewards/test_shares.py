from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rewards.audit.shares import SHARE_TOLERANCE, weights_for_shares
from rewards.reweigh import Mode, advantage_shares
from rewards.types import RewardTable

MODES: tuple[Mode, ...] = ("weighted_sum", "normalize_then_sum")
NAMES = ("lpips", "ssim", "ocr", "aesthetic")


def make_table(
    raw: Tensor, weights: list[float] | None = None, mask: list[list[bool]] | None = None
) -> RewardTable:
    prompts, _, terms = raw.shape
    applicable = torch.ones(prompts, terms, dtype=torch.bool)
    return RewardTable(
        names=NAMES[:terms],
        raw=raw,
        is_applicable=applicable if mask is None else torch.tensor(mask),
        weights=torch.ones(terms) if weights is None else torch.tensor(weights),
        std_floors=torch.full((terms,), 1e-4),
    )


def draw_raw(seed: int, *, prompts: int = 8, images: int = 8, terms: int = 4) -> Tensor:
    """Correlated scores, each term with a scale, an offset, and prompts of unlike spread."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.eye(terms) + 0.4 * torch.randn(terms, terms, generator=generator)
    scales = torch.tensor([0.02, 0.3, 1.0, 20.0])[:terms]
    spreads = torch.rand(prompts, 1, terms, generator=generator) + 0.2
    noise = torch.randn(prompts, images, terms, generator=generator) @ mixing
    return scales * (noise * spreads + torch.randn(terms, generator=generator))


def reached(table: RewardTable, mode: Mode, weights: Tensor) -> list[float]:
    return advantage_shares(replace(table, weights=weights), mode=mode).tolist()


def test_weights_of_independent_terms_are_worked_out() -> None:
    # Scores +-1 and +-2, uncorrelated: variances w1^2 and 4 w2^2 as 1 to 4 for w1 = w2.
    raw = torch.tensor([[[1.0, 2.0], [1.0, -2.0], [-1.0, 2.0], [-1.0, -2.0]]])
    weights = weights_for_shares(make_table(raw), "weighted_sum", {"lpips": 0.2, "ssim": 0.8})
    torch.testing.assert_close(weights, torch.tensor([0.5, 0.5]), rtol=0, atol=1e-4)
    # Standardised they have one spread: w1^2 to w2^2 as 0.2 to 0.8, so w2 = 2 w1.
    weights = weights_for_shares(make_table(raw), "normalize_then_sum", {"lpips": 0.2, "ssim": 0.8})
    torch.testing.assert_close(weights, torch.tensor([1 / 3, 2 / 3]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shares", [(0.4, 0.2, 0.3, 0.1), (0.05, 0.05, 0.1, 0.8)])
def test_weights_give_the_shares_asked_for(mode: Mode, shares: tuple[float, ...]) -> None:
    table = make_table(draw_raw(0))
    weights = weights_for_shares(table, mode, dict(zip(NAMES, shares, strict=True)))
    assert reached(table, mode, weights) == pytest.approx(list(shares), abs=0.002)
    assert weights.sum().item() == pytest.approx(1.0)
    assert (weights > 0).all()


@pytest.mark.parametrize(
    ("mode", "given"),
    [("weighted_sum", (20.0, 2.0, 0.5, 0.02)), ("normalize_then_sum", (2.0, 1.5, 0.8, 1.0))],
)
def test_weights_give_the_shares_that_others_gave_under_masks(
    mode: Mode, given: tuple[float, ...]
) -> None:
    # With terms that do not apply everywhere not all shares can be had; these can.
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(8, 4, generator=generator) < 0.6
    mask[:, 3] = True
    mask[0] = True
    table = make_table(draw_raw(0).masked_fill(~mask[:, None], float("nan")), mask=mask.tolist())
    asked = reached(table, mode, torch.tensor(given))
    assert min(asked) > 0
    total = sum(asked)
    shares = {name: share / total for name, share in zip(NAMES, asked, strict=True)}
    weights = weights_for_shares(table, mode, shares)
    assert reached(table, mode, weights) == pytest.approx(asked, abs=SHARE_TOLERANCE)


def test_weights_are_found_for_pairs_of_images() -> None:
    # With two images a group every pair of terms rises together or against each other exactly,
    # and the minimum of the objective lies where totals cancel.
    found = []
    for seed in range(2):
        table = make_table(draw_raw(seed, prompts=16, images=2))
        shares = {"lpips": 0.4, "ssim": 0.2, "ocr": 0.3, "aesthetic": 0.1}
        weights = weights_for_shares(table, "weighted_sum", shares)
        found.append(reached(table, "weighted_sum", weights))
    assert found == [pytest.approx([0.4, 0.2, 0.3, 0.1], abs=SHARE_TOLERANCE)] * 2


def test_weights_keep_the_signs_of_the_table() -> None:
    table = make_table(draw_raw(1), weights=[1.0, -0.5, 0.0, 1.0])
    shares = {"lpips": 0.5, "ssim": 0.3, "ocr": 0.2}
    weights = weights_for_shares(table, "weighted_sum", shares)
    # The last has no share.
    assert weights.sign().tolist() == [1.0, -1.0, 1.0, 0.0]
    assert weights.abs().sum().item() == pytest.approx(1.0)
    assert reached(table, "weighted_sum", weights) == pytest.approx([0.5, 0.3, 0.2, 0], abs=0.002)


def test_weights_do_not_count_groups_without_any_spread() -> None:
    raw = torch.cat([draw_raw(3), torch.full((8, 8, 4), 0.7)])
    shares = {"lpips": 0.6, "aesthetic": 0.4}
    alone = weights_for_shares(make_table(raw[:8]), "weighted_sum", shares)
    assert torch.equal(weights_for_shares(make_table(raw), "weighted_sum", shares), alone)


def test_weights_refuse_terms_that_are_flat_everywhere() -> None:
    raw = draw_raw(0)
    raw[:, :, 2] = torch.linspace(0, 1, 8)[:, None]
    mask = [[True, True, row < 5, True] for row in range(8)]
    with pytest.raises(
        ValueError, match=r"share 0.3 of ocr: the term applies to 5 of 8 prompts and is flat in"
    ):
        weights_for_shares(make_table(raw, mask=mask), "weighted_sum", {"ocr": 0.3, "lpips": 0.7})
    weights = weights_for_shares(make_table(raw), "weighted_sum", {"ssim": 0.3, "lpips": 0.7})
    assert weights[2] == 0


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_weights_refuse_terms_in_conflict_and_give_the_nearest(sign: float) -> None:
    # One pulls where the other pushes, by its scores or by the sign of its weight: shares are
    # w1 / (w1 - w2) and -w2 / (w1 - w2), never both inside 0..1, and nearest with one of them only.
    scores = torch.tensor([[0.0], [1.0], [3.0], [2.0]])
    table = make_table(torch.cat([scores, -sign * scores], dim=1)[None], weights=[1.0, sign])
    with pytest.raises(ValueError, match="no weights were found") as caught:
        weights_for_shares(table, "weighted_sum", {"lpips": 0.6, "ssim": 0.4})
    found = re.search(
        r"the shares \[lpips=0.6, ssim=0.4\]; the nearest, \[lpips=(\S+), ssim=(\S+)\], give "
        r"\[lpips=(\S+), ssim=\S+\]. Farthest off is (\w+), .* "
        r"in conflict with (\w+) \(correlation -1.00\). Ask",
        str(caught.value),
    )
    assert found is not None
    # Wherever the first weight is the larger one its share is 1 or more.
    assert float(found[1]) > sign * float(found[2]) >= 0
    assert float(found[3]) == pytest.approx(1.0, abs=0.01)
    assert {found[4], found[5]} == {"lpips", "ssim"}


def test_weights_refuse_a_share_that_a_rarely_applicable_term_cannot_have() -> None:
    # Where the second term is alone in 6 of 8 groups, it has at least 6/8 of the shares.
    mask = [[row < 2, True] for row in range(8)]
    table = make_table(draw_raw(4, terms=2), mask=mask)
    with pytest.raises(
        ValueError,
        match=r"lpips, which varies in 2 of the 8 groups .*, and is the only one to do so in 0 of",
    ):
        weights_for_shares(table, "weighted_sum", {"lpips": 0.5, "ssim": 0.5})
    weights = weights_for_shares(table, "weighted_sum", {"lpips": 0.2, "ssim": 0.8})
    assert reached(table, "weighted_sum", weights) == pytest.approx([0.2, 0.8], abs=0.002)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"lpisp": 1.0}, "share of lpisp: no such term in the table; did you mean lpips?"),
        ({"zzz": 1.0}, "use any of lpips, ssim, ocr, aesthetic"),
        ({"lpips": 1.5, "ocr": -0.5}, "share -0.5 of ocr: must be a finite number of 0 or more"),
        ({"lpips": 40.0, "ocr": 60.0}, "add up to 100, not to 1; divide each by 100"),
        ({}, "add up to 0, not to 1; name at least one term"),
    ],
)
def test_weights_refuse_shares_that_are_none(shares: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        weights_for_shares(make_table(draw_raw(0)), "weighted_sum", shares)
