"""A judge on loopback that answers as a test tells it, and terms that ask it."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rewards.base import CheckedScores, score_checked
from rewards.terms.vlm_judge import VlmJudgeConfig, VlmJudgeReward
from rewards.types import Prompt
from tests.rewards.endpoint import Endpoint, Reply, Request, answering

DOG = Prompt("dog", "a dog")
PIXELS = torch.arange(10, dtype=torch.uint8)[:, None, None, None].expand(10, 3, 2, 2)


def content_of(request: Request) -> list[dict[str, Any]]:
    (message,) = json.loads(request.body)["messages"]
    assert message["role"] == "user"
    return message["content"]


def images_in(request: Request) -> list[np.ndarray]:
    urls = [part["image_url"]["url"] for part in content_of(request) if "image_url" in part]
    files = [url.removeprefix("data:image/png;base64,") for url in urls]
    return [np.array(Image.open(io.BytesIO(base64.b64decode(file)))) for file in files]


def level_in(request: Request) -> int:
    """The grey of the image, which tells the images of a test apart."""
    return int(images_in(request)[-1][0, 0, 0])


def text_in(request: Request) -> str:
    return content_of(request)[-1]["text"]


def says(text: object, *, logprobs: object = None, **others: str) -> Reply:
    """A chat completion."""
    message = {"role": "assistant", "content": text, **others}
    choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": "stop"}
    completion = {"id": "1", "object": "chat.completion", "created": 1, "model": "judge-1"}
    return Reply(body=json.dumps({**completion, "choices": [choice]}).encode())


def thinks(tokens: Mapping[str, float]) -> Reply:
    """A chat completion of one token, the first, with the probabilities of others."""
    entries = [
        {"token": token, "logprob": math.log(chance), "bytes": [*token.encode()]}
        for token, chance in tokens.items()
    ]
    return says(next(iter(tokens)), logprobs={"content": [{**entries[0], "top_logprobs": entries}]})


def level_of(request: Request) -> Reply:
    return says(str(level_in(request)))


def judging(
    answer: Callable[[Request], Reply | None] = level_of, *, models: int = 200
) -> AbstractContextManager[Endpoint]:
    """A model that answers by a function, and a request for its list by a status."""
    return answering(answer, to_get=Reply(models, b"bad key 7.25"))


def config(question: str = "{prompt}?", **options: Any) -> VlmJudgeConfig:
    values = {"kind": "vlm_judge", "weight": 1.0, "url": "http://a", "model": "judge-1"}
    return VlmJudgeConfig.model_validate({**values, "question": question, **options})


def connect(judge: Endpoint, question: str = "{prompt}?", **options: Any) -> VlmJudgeReward:
    options = {"url": f"{judge.url}/v1", "retries": 0, **options}
    return config(question, **options).build(torch.device("cpu"))


def check(reward: VlmJudgeReward, count: int, prompt: Prompt = DOG) -> CheckedScores:
    return score_checked(reward, [prompt] * count, PIXELS[:count])


def score(reward: VlmJudgeReward, count: int) -> Tensor:
    return check(reward, count).values
