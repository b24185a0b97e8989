"""Build a scorer from the `reward` section of the config; imports only what the config names."""

from __future__ import annotations

import torch

from rewards.base import Reward, TermConfig
from rewards.config import RewardConfig
from rewards.score import Scorer, Term
from rewards.unpickling import loads_tensors_alone


def build_scorer(config: RewardConfig, device: torch.device) -> Scorer:
    """Build every term that the config names.

    Returns:
        A scorer whose terms are in the order of `KINDS`, and by name within a kind.
    """
    weights = config.weights()
    terms = [
        Term(
            name=name,
            reward=build_reward(options, device),
            weight=weights[name],
            std_floor=options.std_floor,
            timeout_seconds=options.timeout_seconds,
            prompt_ids=options.prompt_ids,
            is_trained_on=options.when == "always",
        )
        for name, options in config.terms.items()
    ]
    return Scorer(terms, is_overlapping=config.overlap)


def build_reward(options: TermConfig, device: torch.device) -> Reward:
    """Build one term; files of weights are loaded only as tensors."""
    if options.users_function() is not None:
        return options.build(device)
    with loads_tensors_alone():
        return options.build(device)
