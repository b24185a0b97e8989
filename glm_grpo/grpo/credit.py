"""Credit by place: how much better each token drew its part of the image than others did.

Scores are made of places: a similarity is a mean over a map, a text is read letter by letter. A
token is told about the places that it draws, and with a smaller weight about those that are drawn
after it. K is the number of places, and their grid is that of the tokens that are decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from glm_grpo.grpo.advantages import (
    bounded,
    centred_rewards,
    divisor,
    without_left_out,
)
from glm_grpo.types import Normalization
from rewards.score_map import Grid, overlaps
from rewards.weighting import is_zero_std


@dataclass(frozen=True)
class TokenPlaces:
    """Which places of an image each of its T tokens draws.

    Attributes:
        grid: The K places, row by row.
        own: Fraction of each place that a token draws; 1 for the place that contains a token of a
            finer grid.
        to_go: 1 for each place that the token or a later one of the same grid draws a part of:
            all of what is earned there may depend on it.
    """

    grid: Grid
    own: Float32[Tensor, "T K"]
    to_go: Float32[Tensor, "T K"]


@lru_cache(maxsize=2)
def token_places(token_grids: tuple[Grid, ...], grid: Grid) -> TokenPlaces:
    """Places of tokens that are drawn row by row, one grid after the other.

    A token of the same grid draws one place. One of a coarser grid (a small preview) draws all the
    places that it shows, one of a finer grid the place in which it lies. Remembered, because all
    steps of a run need the same, which takes seconds for images of 2048 x 2048 pixels.

    Args:
        token_grids: Grids that together have the T tokens; each covers the whole image. Grids
            without tokens are ignored.
        grid: Places.
    """
    own, to_go = [], []
    for tokens in token_grids:
        if not len(tokens):
            continue
        # Fractions of each place that tokens cover, and of each token that lie in places, [T K].
        covered = torch.kron(
            overlaps(grid.rows, tokens.rows), overlaps(grid.columns, tokens.columns)
        )
        inside = torch.kron(
            overlaps(tokens.rows, grid.rows), overlaps(tokens.columns, grid.columns)
        ).T
        drawn = torch.maximum(covered, inside)
        own.append(drawn)
        to_go.append((drawn > 0).flip(0).cummax(dim=0).values.flip(0))
    return TokenPlaces(grid, torch.cat(own).float(), torch.cat(to_go).float())


def token_advantages(
    rewards: Float32[Tensor, "P G"],
    placed: Float64[Tensor, "P G R K"],
    places: TokenPlaces,
    *,
    reward_to_go: float,
    normalization: Normalization,
    std_floor: float,
    clip: float | None,
    is_standardised: bool = False,
) -> Float32[Tensor, "P G T"]:
    """Advantages of each token of each image.

    With c_rk, what place k earned of term r, compared within the group:

        own_t = sum over the places that token t draws of c_rk
        to_go_t = sum over these and all places that are not yet finished in its grid
        credit_rt = scale((1 - w) scale(own_t) + w scale(to_go_t))
        credit_t = sum over terms of credit_rt + what has no place

    `scale` gives a term the root mean square over the batch (over each group, if terms were
    standardised there) that it has as credit of whole images, so that a term's weight keeps its
    meaning, and w means the same for 16 places and for 1,024. Rewards that have no place
    (terms without parts, rests, a KL penalty) are credit of all tokens of the image. Then tokens
    are divided as images are, scaled so that their root mean square is that of the images'
    advantages, and bounded by `clip`, at each token for itself. One factor scales the whole batch,
    but with `group_std`, which divides every group by itself, each group has its own: the tokens of
    one whose totals are nearly equal would exceed all others.

    w = 1 is the reward-to-go, which is unbiased if what a place earns depends, in each grid,
    on no token after its last one; w = 0 compares a token by its own place alone. With one
    place, or no term with places, every token has the advantage of its image. In zero-std groups
    and for images left out of theirs everything is exactly 0. At each token the advantages of a
    group have a sum of zero if all of its boxes are compared by place; those of a kind, which may
    stand anywhere, have one over all tokens.

    Source: reward-to-go: Williams 1992, "Simple statistical gradient-following algorithms",
    Machine Learning 8; the rest is this project's.

    Args:
        rewards: Totals, less penalties; see `group_advantages`.
        placed: Result of `placed_contributions`.
        places: Places of the T tokens.
        reward_to_go: Weight, w above, of the places that are drawn later, 0..1.
        normalization: See `group_advantages`; `std_floor` and `clip` too.
        is_standardised: Whether terms were divided by their spread in each group, as under
            `normalize_then_sum`. A term that hardly differs in one group, whose places do, would
            otherwise lose its weight in the others.
    """
    centred = centred_rewards(rewards)
    divided_by = divisor(centred, normalization, std_floor)
    # Zeros change no ratio of mean squares over the same images.
    centred, parts = without_left_out(centred), _varied_parts(rewards, placed)
    of_images = parts.sum(dim=-1)
    scale = partial(_scaled, like=of_images, by_group=is_standardised)
    own, to_go = (scale(parts @ weights.double().T) for weights in (places.own, places.to_go))
    of_terms = scale(own + reward_to_go * (to_go - own))
    # What has no place stays: the rest of the images' rewards. Written in this way, tokens are
    # equal to their image to the bit if there is one place.
    rewards_of_tokens = centred[..., None] + (of_terms - of_images[..., None]).sum(dim=2)
    tokens = rewards_of_tokens / divided_by[..., None]
    by_group = normalization == "group_std"
    wanted, found = (_mean_square(each, by_group) for each in (centred / divided_by, tokens))
    tokens = tokens * _ratio(wanted, found)[..., None, None]
    return bounded(tokens, clip).float()


def place_credit(
    rewards: Float32[Tensor, "P G"], placed: Float64[Tensor, "P G R K"], grid: Grid
) -> Float32[Tensor, "P G h w"]:
    """What each place contributed by all terms, compared within the group; see `Experience`.

    Args:
        rewards: As in `token_advantages`; `placed` too.
        grid: The K places.
    """
    found = _varied_parts(rewards, placed).sum(dim=2).float()
    return found.reshape(*found.shape[:2], grid.rows, grid.columns)


def _varied_parts(
    rewards: Float32[Tensor, "P G"], placed: Float64[Tensor, "P G R K"]
) -> Float64[Tensor, "P G R K"]:
    """Parts, with 0 in zero-std groups and for images left out."""
    parts = without_left_out(placed)
    return parts.masked_fill(is_zero_std(rewards)[:, None, None, None], 0.0)


def _scaled(
    values: Float64[Tensor, "P G R T"], like: Float64[Tensor, "P G R"], by_group: bool
) -> Float64[Tensor, "P G R T"]:
    """Values whose root mean square over batch or group is, term by term, that of others."""
    wanted, found = (
        each.square().mean(dim=1 if by_group else (0, 1), keepdim=True) for each in (like, values)
    )
    return values * _ratio(wanted, found.mean(dim=-1))[..., None]


def _mean_square(values: Float64[Tensor, "P G *T"], by_group: bool) -> Float64[Tensor, "*P"]:
    squares = values.square().flatten(1)
    return squares.mean(dim=1) if by_group else squares.mean()


def _ratio(wanted: Float64[Tensor, "*R"], found: Float64[Tensor, "*R"]) -> Float64[Tensor, "*R"]:
    """Factor between root mean squares; 0 where there is nothing to scale."""
    # Rounded to float32, in which means over other numbers of equal values are equal.
    rounded = found.float()
    return (wanted.float() / rounded).sqrt().double().masked_fill(rounded == 0, 0.0)
