"""Scores in chunks are those of all logits at once, and so are their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glm_grpo.glm_image import token_scores
from glm_grpo.glm_image.token_scores import score_tokens

ROWS, TOKENS, WIDTH, ENTRIES = 2, 7, 5, 11


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    # Three tokens a chunk: the last one is not full.
    monkeypatch.setattr(token_scores, "CHUNK_ENTRIES", 3 * ENTRIES + 1)


def made(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


TOKEN_IDS = torch.randint(ENTRIES, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))


def make_kept() -> Tensor:
    return (made(ROWS, TOKENS, ENTRIES, seed=3) > 0).scatter(-1, TOKEN_IDS[..., None], True)


def plain(hidden: Tensor, weight: Tensor, temperature: float, is_kept: Tensor | None) -> Tensor:
    logits = hidden @ weight.T / temperature
    if is_kept is not None:
        logits = logits.masked_fill(~is_kept, -torch.inf)
    return logits.log_softmax(dim=-1)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("is_truncated", [False, True])
def test_score_tokens_equals_the_plain_computation(temperature: float, is_truncated: bool) -> None:
    hidden = made(ROWS, TOKENS, WIDTH, seed=1).requires_grad_()
    weight = made(ENTRIES, WIDTH, seed=2).requires_grad_()
    is_kept = make_kept() if is_truncated else None

    scores = score_tokens(hidden, weight, TOKEN_IDS, temperature=temperature, is_kept=is_kept)
    every = plain(hidden, weight, temperature, is_kept)
    chosen = every.gather(-1, TOKEN_IDS[..., None]).squeeze(-1)

    torch.testing.assert_close(scores.log_probs, chosen, rtol=1e-5, atol=1e-5)
    entropy = torch.distributions.Categorical(probs=every.exp()).entropy()
    torch.testing.assert_close(scores.entropy, entropy, rtol=1e-4, atol=1e-5)
    assert not scores.entropy.requires_grad
    wanted = made(ROWS, TOKENS, seed=4)
    found = torch.autograd.grad((scores.log_probs * wanted).sum(), (hidden, weight))
    expected = torch.autograd.grad((chosen * wanted).sum(), (hidden, weight))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_score_tokens_leaves_out_gradients_that_nobody_asked_for() -> None:
    hidden = made(ROWS, TOKENS, WIDTH, seed=1).requires_grad_()
    weight = made(ENTRIES, WIDTH, seed=2)
    score_tokens(hidden, weight, TOKEN_IDS, temperature=1.0).log_probs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_score_tokens_never_holds_the_logits_of_all_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    linear = torch.nn.functional.linear

    def watch(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = linear(hidden, weight)
        sizes.append(logits.numel())
        return logits

    monkeypatch.setattr(torch.nn.functional, "linear", watch)
    hidden = made(ROWS, TOKENS, WIDTH, seed=1).requires_grad_()
    scores = score_tokens(hidden, made(ENTRIES, WIDTH, seed=2), TOKEN_IDS, temperature=1.0)
    scores.log_probs.sum().backward()
    # 14 tokens, three at a time, forwards and again backwards.
    assert len(sizes) == 10
    assert max(sizes) == 3 * ENTRIES
