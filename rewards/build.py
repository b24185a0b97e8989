"""From the `reward` section of the config to a scorer; imports only what the config names."""

from __future__ import annotations

import torch

from rewards.base import Reward, TermConfig
from rewards.config import RewardConfig
from rewards.score import Scorer, Term
from rewards.unpickling import loads_tensors_alone


def build_scorer(
    config: RewardConfig, device: torch.device, *, process_device: torch.device | None = None
) -> Scorer:
    """Build every term that the config names.

    Args:
        config: A validated section.
        device: Where the networks of the terms are put.
        process_device: Where those of terms in a process of their own are put, which no one can
            move afterwards; None for the same.

    Returns:
        A scorer whose terms stand in the order of `KINDS`, those of one kind by name.

    Raises:
        RewardError: A term's weights are missing or do not fit.
    """
    weights = config.weights()
    terms = [
        Term(
            name=name,
            reward=_build_where_asked(name, options, device, process_device or device),
            weight=weights[name],
            std_floor=options.std_floor,
            timeout_seconds=options.timeout_seconds,
            only=options.only,
            is_trained_on=options.when == "always",
        )
        for name, options in config.terms.items()
    ]
    return Scorer(terms, is_overlapping=config.overlap)


def _build_where_asked(
    name: str, options: TermConfig, device: torch.device, process_device: torch.device
) -> Reward:
    if options.run_in == "thread":
        return build_reward(options, device)
    from rewards.process import ProcessReward  # noqa: PLC0415 (imports this file)

    return ProcessReward(options, name=name, device=process_device)


def build_reward(options: TermConfig, device: torch.device) -> Reward:
    """Build one term; files of weights are loaded as tensors alone.

    Raises:
        RewardError: Its weights are missing or do not fit.
    """
    if options.is_users_program:
        return options.build(device)
    with loads_tensors_alone():
        return options.build(device)
