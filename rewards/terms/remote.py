"""Score on another machine or in another Python environment, over HTTP."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import torch
from pydantic import Field

from rewards.base import Need, Reward, TermConfig
from rewards.options import Url, Variable

TOKEN_VARIABLE = "GLM_GRPO_REWARD_TOKEN"
"""Environment variable with a reward server's token, on its side and usually on the run's."""


class RemoteConfig(TermConfig):
    """A scorer on another machine or in another Python environment, over HTTP."""

    kind: Literal["remote"]
    """Class that scores."""
    url: Url = Field(examples=["http://127.0.0.1:8700"])
    """Address of `glm-grpo serve-reward`, such as http://scores.example:8700."""
    token_variable: Variable | None = TOKEN_VARIABLE
    """Environment variable with the scorer's token; null, or an unset variable: send none."""
    needs_of_prompt: Annotated[tuple[Need, ...], Field(strict=False)] = ("prompt",)
    """Parts of a prompt that the scorer uses: some of prompt, text, target, source; must equal what
    the scorer states. It is not asked about prompts without them."""
    retries: int = Field(default=3, ge=0, le=1000)
    """Further attempts after a broken connection or a response with status 429, 502, 503 or 504."""

    def needs(self) -> tuple[Need, ...]:
        """The needs stated in the config."""
        return self.needs_of_prompt

    def build(self, device: torch.device) -> Reward:
        """See `TermConfig`."""
        del device
        # httpx takes a tenth of a second to import, which other configs should not wait for.
        from rewards.remote.reward import RemoteReward  # noqa: PLC0415

        return RemoteReward(
            self.url,
            needs=self.needs(),
            retries=self.retries,
            timeout_seconds=self.timeout_seconds,
            token=_read_token(self.token_variable),
        )

    def memory_bytes(self) -> int:
        """0: its network is in the memory of another process."""
        return 0


def _read_token(variable: str | None) -> str:
    # A third-party scorer may need none, and reports it if it does.
    if variable is None or not os.environ.get(variable):
        return ""
    remedy = "set the term's token_variable=null if the server needs none"
    from rewards.remote.client import read_key  # noqa: PLC0415

    return read_key(variable, option="token_variable", remedy=remedy)
