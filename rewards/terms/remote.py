"""Scorer on another machine or in another Python environment, over HTTP."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator

from rewards.base import Need, Reward, TermConfig
from rewards.options import Url, Variable, problem_at

TOKEN_VARIABLE = "GLM_GRPO_REWARD_TOKEN"
"""Environment variable of a reward server's token, on its side and, as a rule, on the run's."""


class RemoteConfig(TermConfig):
    """A scorer on another machine or in another Python environment, over HTTP."""

    kind: Literal["remote"]
    """Class that scores."""
    url: Url
    """Where `glm-grpo serve-reward` listens, such as http://scores.example:8700."""
    token_variable: Variable | None = TOKEN_VARIABLE
    """Environment variable that holds the scorer's token; null, or not set: none is sent."""
    needs_of_prompt: Annotated[tuple[Need, ...], Field(strict=False)] = ("prompt",)
    """What of a prompt the scorer uses: some of prompt, text, target, source, as the scorer
    says it does. It is not asked about prompts that lack it."""
    retries: int = Field(default=3, ge=0, le=1000)
    """Further tries after a broken connection or an answer of status 429, 502, 503 or 504."""

    @model_validator(mode="after")
    def _check_place(self) -> RemoteConfig:
        if self.run_in == "process":
            rule = "a remote scorer is in a process of its own already"
            raise problem_at(("run_in",), self.run_in, rule, "remove run_in")
        return self

    def needs(self) -> tuple[Need, ...]:
        """As the user stated."""
        return self.needs_of_prompt

    def build(self, device: torch.device) -> Reward:
        """See `TermConfig`."""
        del device
        # httpx takes a tenth of a second, which a config without remote terms need not wait for.
        from rewards.remote.reward import RemoteReward  # noqa: PLC0415

        return RemoteReward(
            self.url,
            needs=self.needs(),
            retries=self.retries,
            timeout_seconds=self.timeout_seconds,
            token=_read_token(self.token_variable),
        )

    def memory_bytes(self) -> int:
        """Its network is behind an endpoint, in the memory of another process."""
        return 0


def _read_token(variable: str | None) -> str:
    # A scorer of someone else's may want none, and one that does says so.
    if variable is None or not os.environ.get(variable):
        return ""
    remedy = "set the term's token_variable=null where none is wanted"
    from rewards.remote.client import read_key  # noqa: PLC0415

    return read_key(variable, option="token_variable", remedy=remedy)
