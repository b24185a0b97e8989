"""Models of stock classes with random weights, one of each family: small, and often wrong."""

from __future__ import annotations

import copy
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest
import torch
from diffusers import GlmImagePipeline

from glm_grpo.config import Config
from glm_grpo.models.glm_image.planner import read_part_configs
from glm_grpo.models.glm_image.policy import GlmImagePolicy
from glm_grpo.models.janus_pro.loading import JanusPro, load_pipeline
from glm_grpo.models.janus_pro.policy import JanusProPolicy
from glm_grpo.models.sampling import Truncation
from glm_grpo.tiny import models, world
from glm_grpo.types import Experience, ImageBatch, PromptBatch, Rollout
from rewards.types import Prompt, RewardTable
from tests.factories import tiny_config
from tests.janus_miniature import SIDE, write_folder

SIZE = world.SIZE

UNTRUNCATED = Truncation()


@pytest.fixture(scope="session")
def random_pipeline_folder(tmp_path_factory):
    """A folder in the diffusers layout, written by the stock pipeline."""
    folder = tmp_path_factory.mktemp("pipeline")
    pipeline = GlmImagePipeline(
        tokenizer=models.build_glyph_tokenizer(),
        processor=models.build_processor(),
        text_encoder=models.build_text_encoder(seed=1),
        vision_language_encoder=models.build_policy_model(seed=2),
        vae=models.build_vae(seed=3),
        transformer=models.build_transformer(seed=4),
        scheduler=models.build_scheduler(),
    )
    pipeline.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def shallow_configs(random_pipeline_folder):
    """The folder's, but one layer of each kind: a layer takes as much as any other to plan."""
    parts = read_part_configs(str(random_pipeline_folder))
    return replace(
        parts,
        language=parts.language
        | {"text_config": parts.language["text_config"] | {"num_hidden_layers": 1}},
        transformer=parts.transformer | {"num_layers": 1},
        vae=parts.vae | {"layers_per_block": 1},
    )


@pytest.fixture(scope="session")
def loaded_pipeline(random_pipeline_folder):
    """What the folder holds, for tests that change nothing of it."""
    pipeline = GlmImagePipeline.from_pretrained(random_pipeline_folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture
def random_pipeline(loaded_pipeline):
    """A copy for every test, because policies change what they are built on."""
    return copy.deepcopy(loaded_pipeline)


def config_of(
    *,
    temperature: float = 1.0,
    guidance_scale: float = 5.0,
    truncation: Truncation = UNTRUNCATED,
    adapter_rank: int | None = None,
    adapter_alpha: float = 8.0,
    target_modules: str = "null",
    entropy_coef: float = 0.0,
    is_checkpointing: bool = False,
) -> Config:
    """A config of full fine-tuning, unless adapter_rank is set."""
    options = f"rank: {adapter_rank}, alpha: {adapter_alpha}, target_modules: {target_modules}"
    adapter = "null" if adapter_rank is None else f"{{{options}}}"
    kept = {key: value for key, value in asdict(truncation).items() if value is not None}
    return tiny_config(
        f"model.adapter={adapter}",
        f"model.gradient_checkpointing={str(is_checkpointing).lower()}",
        f"loss.entropy_coef={entropy_coef}",
        f"rollout.temperature={temperature}",
        f"+rollout.guidance_scale={guidance_scale}",
        *(f"rollout.{key}={value}" for key, value in kept.items()),
    )


def policy_on(
    pipeline: GlmImagePipeline, *, is_compiling: bool = False, **changes: Any
) -> GlmImagePolicy:
    """A policy of `config_of` these changes."""
    return GlmImagePolicy(config_of(**changes), pipeline, is_compiling=is_compiling)


@pytest.fixture(scope="session")
def build_policy():
    """`policy_on`, as a fixture: test folders are no packages."""
    return policy_on


@pytest.fixture
def make_policy(random_pipeline):
    """`policy_on` a random pipeline of the test's own."""
    return partial(policy_on, random_pipeline)


@pytest.fixture(scope="session")
def janus_folder(tmp_path_factory):
    """A Janus-Pro in the published layout."""
    return write_folder(tmp_path_factory.mktemp("janus"))


@pytest.fixture(scope="session")
def loaded_janus(janus_folder):
    """What the folder holds, for tests that change nothing of it."""
    return load_pipeline(str(janus_folder), dtype=torch.float32)


def janus_policy_on(parts: JanusPro, **changes: Any) -> JanusProPolicy:
    """Like `policy_on`, with guidance as published."""
    return JanusProPolicy(config_of(**changes), parts)


@pytest.fixture(scope="session")
def build_janus_policy():
    """`janus_policy_on`, as a fixture: test folders are no packages."""
    return janus_policy_on


@pytest.fixture
def make_janus_policy(loaded_janus):
    """`janus_policy_on` a copy of the test's own."""
    return partial(
        janus_policy_on, JanusPro(copy.deepcopy(loaded_janus.model), loaded_janus.processor)
    )


@pytest.fixture(scope="session")
def janus_batch():
    """Three prompts of different lengths, three samples each."""
    prompts = (
        Prompt("middle", "a red cat"),
        Prompt("long", "two boats on a lake"),
        Prompt("short", "x"),
    )
    return PromptBatch(prompts, 3, SIDE, SIDE, seed=11, decode_seeds=(5, 6, 7))


@pytest.fixture(scope="session")
def policy(loaded_pipeline):
    """An untruncated policy for tests that leave it as it is."""
    return policy_on(copy.deepcopy(loaded_pipeline))


@pytest.fixture(scope="session")
def rollout(policy, batch):
    """What it draws for `batch`, with the preview of its true size."""
    return policy.sample(batch)


@pytest.fixture(scope="session")
def batch():
    """Two prompts of different length, three samples each."""
    prompts = (
        Prompt("short", 'a sign saying "AB"'),
        Prompt("long", 'a rather longer sign that is saying "WXYZ" below a triangle'),
    )
    return PromptBatch(prompts, 3, SIZE, SIZE, seed=11, decode_seeds=(5, 6))


def experience_of(batch: PromptBatch, rollout: Rollout) -> Experience:
    """An experience around a rollout; images and scores are of no account."""
    shape = (len(batch.prompts), batch.group_size)
    return Experience(
        prompts=batch,
        rollout=rollout,
        images=ImageBatch(torch.zeros(*shape, 3, 32, 32, dtype=torch.uint8), batch.decode_seeds),
        scores=RewardTable(
            ("none",),
            torch.zeros(*shape, 1),
            torch.ones(shape[0], 1, dtype=torch.bool),
            torch.ones(1),
            torch.ones(1),
        ),
        totals=torch.zeros(shape),
        penalties=torch.zeros(shape),
        advantages=torch.zeros(*shape, 1),
    )


@pytest.fixture
def as_experience():
    """`experience_of`, as a fixture: test folders are no packages."""
    return experience_of
