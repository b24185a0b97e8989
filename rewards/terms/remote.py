"""Score on another machine or in another Python environment, over HTTP."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import torch
from jaxtyping import UInt8
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor, nn
from typing_extensions import override

from rewards.base import Need, Reward, TermConfig, has_needs
from rewards.messages import TOKEN_VARIABLE, Failure, ScoreAnswer, ScorerInfo, make_request
from rewards.options import MayChange, Url, Variable
from rewards.types import Prompt, RewardError, Scores

if TYPE_CHECKING:
    from rewards.http_client import HttpClient

_Answer = TypeVar("_Answer", bound=BaseModel)

_LONGEST_QUOTED = 200
"""Characters of an answer quoted in an error."""


class RemoteConfig(TermConfig):
    """A scorer on another machine or in another Python environment, over HTTP."""

    kind: Literal["remote"]
    """Class that scores."""
    url: MayChange[Url] = Field(examples=["http://127.0.0.1:8700"])
    """Address of `glm-grpo serve-reward`, such as http://scores.example:8700."""
    token_variable: MayChange[Variable | None] = TOKEN_VARIABLE
    """Environment variable with the scorer's token; null, or an unset variable: send none."""
    needs_of_prompt: Annotated[tuple[Need, ...], Field(strict=False)] = ("prompt",)
    """Parts of a prompt that the scorer uses: some of prompt, text, target, source, objects
    (`include` in its metadata); must equal what the scorer states. It is not asked about prompts
    without them."""
    retries: MayChange[int] = Field(default=3, ge=0, le=1000)
    """Further attempts after a broken connection or a response with status 429, 502, 503 or 504."""

    @override
    def needs(self) -> tuple[Need, ...]:
        """The needs stated in the config."""
        return self.needs_of_prompt

    @override
    def scorer(self) -> str:
        """Name and digest of the scorer that answers now."""
        info = self._connect().info
        return f"{info.name} ({info.digest})" if info.digest else info.name

    @override
    def build(self, device: torch.device) -> Reward:
        del device
        return self._connect()

    def _connect(self) -> RemoteReward:
        # httpx takes a tenth of a second to import, which other configs should not wait for.
        from rewards.http_client import HttpClient, read_key  # noqa: PLC0415

        token = ""
        # A third-party scorer may need none, and reports it if it does.
        if self.token_variable is not None and os.environ.get(self.token_variable):
            remedy = "set the term's token_variable=null if the server needs none"
            token = read_key(self.token_variable, option="token_variable", remedy=remedy)
        client = HttpClient(self.url, key=token, seconds=self.timeout_seconds, retries=self.retries)
        return RemoteReward(client, self.needs_of_prompt)

    @override
    def memory_bytes(self) -> int:
        """0: its network is in the memory of another process."""
        return 0


class RemoteReward:
    """Scores of a remote scorer that uses the format of `rewards.messages`.

    Range, device, memory and licence are those of the scorer. Proxies from the environment are
    used, except for this machine's own addresses.

    Args:
        needs: Parts of a prompt that it uses, as the user expects; must equal what the scorer
            states.

    Raises:
        RewardError: Nothing listens there, or the server wants another token, is not a scorer or of
            another version, or uses other parts of a prompt.
    """

    def __init__(self, client: HttpClient, needs: Sequence[Need]) -> None:
        self._client = client
        self._needs = frozenset(needs)
        self.info = info = self._ask("/info", None, ScorerInfo)
        if frozenset(info.needs) != self._needs:
            raise RewardError(
                f"the scorer {info.name} at {client.url} uses {_list(info.needs)}, but the config "
                f"says {_list(needs)}; set the term's needs_of_prompt=[{','.join(info.needs)}]"
            )

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether the prompt has what the scorer uses; does not ask the scorer."""
        return has_needs(prompt, self._needs)

    def score(self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]) -> Scores:
        """Send images and prompts in one request; refusals and notes are the scorer's."""
        body = make_request(prompts, pixels, self._needs).model_dump_json().encode()
        answer = self._ask("/score", body, ScoreAnswer)
        return Scores(answer.scores, answer.notes, objects=answer.objects)

    def modules(self) -> tuple[nn.Module, ...]:
        """Empty, because the networks belong to the other process."""
        return ()

    def _ask(self, path: str, body: bytes | None, kind: type[_Answer]) -> _Answer:
        from rewards.http_client import NoAnswerError  # noqa: PLC0415 (see above)

        where = f"the scorer at {self._client.url}"
        try:
            answer = self._client.request(path, body)
        except NoAnswerError as error:
            raise RewardError(
                f"{where} gave no answer to {path} ({error}); start it (`glm-grpo serve-reward`), "
                "set the term's url to where it listens, or raise the term's timeout_seconds if it "
                "is only slow"
            ) from error
        if answer.status_code == 401:
            raise RewardError(
                f"{where} requires its token, but got another one or none; export the token that "
                "the server was started with, or that it printed, in "
                f"{TOKEN_VARIABLE} or the variable that the term's token_variable names"
            )
        try:
            if answer.status_code == 200:
                return kind.model_validate_json(answer.content)
            failure = Failure.model_validate_json(answer.content).error
        except ValidationError as error:
            raise RewardError(
                f"{where} answered {path} with status {answer.status_code} and "
                f"{answer.text[:_LONGEST_QUOTED]!r}, unlike a scorer "
                f"({error.errors()[0]['msg']}); correct the scorer, or set the term's url to the "
                "address that `glm-grpo serve-reward` prints"
            ) from error
        raise RewardError(f"{where} failed (status {answer.status_code}): {failure}")


def _list(needs: Iterable[Need]) -> str:
    return " and ".join(sorted(needs)) or "only the image"
