"""Scores in chunks are those of all logits at once, and so are their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from glm_grpo.models import token_scores
from glm_grpo.models.token_scores import score_tokens, token_log_probs

ROWS, TOKENS, WIDTH, ENTRIES, HEAD = 2, 7, 5, 11, 13


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    # Three tokens a chunk, four where the head is trained: the last one is not full.
    monkeypatch.setattr(token_scores, "CHUNK_ENTRIES", 3 * ENTRIES + 1)
    monkeypatch.setattr(token_scores, "TRAINED_CHUNK_ENTRIES", 4 * ENTRIES + 1)


def made(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


TOKEN_IDS = torch.randint(ENTRIES, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))


def make_kept() -> Tensor:
    return (made(ROWS, TOKENS, ENTRIES, seed=3) > 0).scatter(-1, TOKEN_IDS[..., None], True)


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    entries = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            self.entries = max(self.entries, tensor.numel())
        return result


def plain(
    hidden: Tensor, weight: Tensor, temperature: float, sampling_mask: Tensor | None
) -> Tensor:
    logits = hidden @ weight[:ENTRIES].T / temperature
    if sampling_mask is not None:
        logits = logits.masked_fill(~sampling_mask, -torch.inf)
    return logits.log_softmax(dim=-1)


@pytest.mark.parametrize(
    ("temperature", "is_truncated", "chunk"),
    [(1.0, False, 3), (0.5, True, 1), (0.5, False, ROWS * TOKENS), (1.0, True, 3)],
)
@pytest.mark.parametrize("is_trained", [False, True])
def test_scores_and_gradients_equal_the_plain_ones(
    temperature: float,
    is_truncated: bool,
    chunk: int,
    is_trained: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_scores, "TRAINED_CHUNK_ENTRIES", chunk * ENTRIES)
    hidden = made(ROWS, TOKENS, WIDTH, seed=1).requires_grad_()
    weight = made(HEAD, WIDTH, seed=2).requires_grad_(is_trained)
    sampling_mask = make_kept() if is_truncated else None
    head = {"codebook_size": ENTRIES, "temperature": temperature, "sampling_mask": sampling_mask}

    scores = score_tokens(hidden, weight, TOKEN_IDS, **head)
    alone = token_log_probs(hidden.detach(), weight.detach(), TOKEN_IDS, **head)
    every = plain(hidden, weight, temperature, sampling_mask)
    chosen = every.gather(-1, TOKEN_IDS[..., None]).squeeze(-1)

    torch.testing.assert_close(scores.log_probs, chosen, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(alone, chosen.detach(), rtol=1e-5, atol=1e-5)
    entropy = torch.distributions.Categorical(probs=every.exp()).entropy()
    torch.testing.assert_close(scores.entropy, entropy, rtol=1e-4, atol=1e-5)
    assert not scores.entropy.requires_grad
    # Of two rows of the head that nothing draws, beside what truncation left.
    others = (hidden @ weight[ENTRIES:].T / temperature).exp().sum(dim=-1)
    own = (hidden @ weight[:ENTRIES].T / temperature).exp()
    kept = (own if sampling_mask is None else own * sampling_mask).sum(dim=-1)
    torch.testing.assert_close(scores.outside_codebook, others / (kept + others))
    assert not scores.outside_codebook.requires_grad
    at = (hidden, weight) if is_trained else (hidden,)
    wanted = made(ROWS, TOKENS, seed=4)
    found, expected = (
        torch.autograd.grad((log_probs * wanted).sum(), at)
        for log_probs in (scores.log_probs, chosen)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("temperature", "is_truncated"), [(1.0, True), (0.5, False)])
@pytest.mark.parametrize("is_trained", [False, True])
def test_entropy_has_the_plain_gradient_where_it_is_asked_for(
    temperature: float, is_truncated: bool, is_trained: bool
) -> None:
    hidden = made(ROWS, TOKENS, WIDTH, seed=1).requires_grad_()
    weight = made(HEAD, WIDTH, seed=2).requires_grad_(is_trained)
    sampling_mask = make_kept() if is_truncated else None
    by_token, by_entropy = made(ROWS, TOKENS, seed=4), made(ROWS, TOKENS, seed=5)

    scores = score_tokens(
        hidden,
        weight,
        TOKEN_IDS,
        codebook_size=ENTRIES,
        temperature=temperature,
        sampling_mask=sampling_mask,
        has_entropy_gradient=True,
    )
    every = plain(hidden, weight, temperature, sampling_mask)
    chosen = every.gather(-1, TOKEN_IDS[..., None]).squeeze(-1)
    entropy = -(every.exp() * every.clamp(min=-1e4)).sum(dim=-1)

    torch.testing.assert_close(scores.entropy, entropy, rtol=1e-4, atol=1e-5)
    at = (hidden, weight) if is_trained else (hidden,)
    found = (scores.log_probs * by_token + scores.entropy * by_entropy).sum()
    expected = (chosen * by_token + entropy * by_entropy).sum()
    torch.testing.assert_close(
        torch.autograd.grad(found, at), torch.autograd.grad(expected, at), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("is_trained", [False, True])
def test_what_is_outside_the_codebook_changes_no_score_and_no_gradient(is_trained: bool) -> None:
    found = []
    weight = made(HEAD, WIDTH, seed=2)
    for rows in (ENTRIES, HEAD):
        hidden = made(ROWS, TOKENS, WIDTH, seed=1).requires_grad_()
        head = weight[:rows].clone().requires_grad_(is_trained)
        scores = score_tokens(hidden, head, TOKEN_IDS, codebook_size=ENTRIES, temperature=0.5)
        (slope,) = torch.autograd.grad(scores.log_probs.sum(), hidden)
        found.append((scores.log_probs, scores.entropy, slope))
        assert scores.outside_codebook.eq(0).all() == (rows == ENTRIES)
    for alone, beside in zip(*found, strict=True):
        assert torch.equal(alone, beside)


# A frozen head has its slopes from the forward pass; a trained one makes its logits again, all but
# those it came by last.
@pytest.mark.parametrize(
    ("is_trained", "made_rows"), [(False, [3, 3, 3, 3, 2]), (True, [4, 4, 4, 2, 4, 4, 4])]
)
def test_score_tokens_never_holds_the_logits_of_all_tokens(
    monkeypatch: pytest.MonkeyPatch, is_trained: bool, made_rows: list[int]
) -> None:
    rows: list[int] = []
    make_logits = token_scores._Chunks.logits

    def watch(chunks: token_scores._Chunks, at: slice) -> Tensor:
        logits = make_logits(chunks, at)
        rows.append(len(logits))
        return logits

    monkeypatch.setattr(token_scores._Chunks, "logits", watch)
    hidden = made(ROWS, TOKENS, WIDTH, seed=1).requires_grad_()
    weight = made(HEAD, WIDTH, seed=2).requires_grad_(is_trained)
    with LargestTensor() as largest:
        score_tokens(
            hidden, weight, TOKEN_IDS, codebook_size=ENTRIES, temperature=1.0
        ).log_probs.sum().backward()
    # 14 tokens, at most three at a time, or four.
    assert rows == made_rows
    assert largest.entries == max(made_rows[0] * ENTRIES, ROWS * TOKENS * WIDTH)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_gradients_in_half_precision_are_near_those_in_fp32(half: torch.dtype) -> None:
    hidden = made(ROWS, TOKENS, WIDTH, seed=1).to(half).float()
    weight = made(HEAD, WIDTH, seed=2).to(half).float()
    wanted = made(ROWS, TOKENS, seed=4)
    gradients = []
    for dtype in (torch.float32, half):
        inputs = tuple(x.to(dtype).requires_grad_() for x in (hidden, weight))
        scores = score_tokens(*inputs, TOKEN_IDS, codebook_size=ENTRIES, temperature=0.5)
        gradients.append(torch.autograd.grad((scores.log_probs * wanted).sum(), inputs))
    for exact, rounded in zip(*gradients, strict=True):
        assert rounded.dtype == half
        torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("gradient", [1e-8, 1e5])
def test_gradient_outside_float16_counts_if_its_product_is_inside(gradient: float) -> None:
    # Both codes are equally probable: a slope is a token's row less the mean row, +-(10, 0.1).
    weight = torch.tensor([[20.0, 0.2], [0.0, 0.0]]).half()
    hidden = torch.zeros(4, 2).half().requires_grad_()
    tokens = torch.tensor([0, 1, 0, 1])
    scores = score_tokens(hidden, weight, tokens, codebook_size=2, temperature=1.0)
    entry = 0 if gradient < 1 else 1
    (found,) = torch.autograd.grad(scores.log_probs.sum() * gradient, hidden)
    expected = gradient * weight[0, entry].item() / 2
    wanted = torch.tensor([1.0, -1.0, 1.0, -1.0]) * expected
    torch.testing.assert_close(found[:, entry].float(), wanted, rtol=0.3, atol=0.0)


def test_no_tokens_have_no_scores() -> None:
    none = torch.empty(0, dtype=torch.int64)
    args = (torch.empty(0, WIDTH), made(HEAD, WIDTH, seed=2), none)
    assert token_log_probs(*args, codebook_size=ENTRIES, temperature=1.0).shape == (0,)
    scores = score_tokens(*args, codebook_size=ENTRIES, temperature=1.0)
    assert scores.log_probs.shape == scores.entropy.shape == (0,)
