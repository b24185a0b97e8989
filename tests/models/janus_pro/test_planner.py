"""What a run of Janus-Pro takes: published sizes by hand, activations beside what is allocated."""

from __future__ import annotations

import copy

import pytest
import torch

from glm_grpo.config import compose_config
from glm_grpo.errors import ConfigError
from glm_grpo.models.janus_pro.decoder import JanusProDecoder
from glm_grpo.models.janus_pro.family import build_planner, check_keys
from glm_grpo.models.janus_pro.loading import JanusPro
from glm_grpo.models.janus_pro.planner import JanusProPlanner
from glm_grpo.plan.fit import ConfigPlanner
from glm_grpo.plan.memory import BatchShape, rollout_bytes, update_activations
from glm_grpo.types import PromptBatch, Rollout
from rewards.types import Prompt
from tests.factories import allocated_peak
from tests.janus_miniature import build_model

PROMPTS = ("data.path=prompts.txt", "data.eval_path=held_out.txt")


def config_of(*overrides):
    """Adapters of rank 8 in fp32, 8 images in a micro-batch."""
    adapter = ("model.adapter={rank: 8, alpha: 16.0}", "model.gradient_checkpointing=false")
    options = ("model.dtype=float32", "train.micro_batch_size=8", "rollout.batch_size=null")
    return compose_config(None, "janus_pro_1b_24gb", [*PROMPTS, *adapter, *options, *overrides])


@pytest.mark.parametrize(
    ("size", "policy", "adapters", "cached"),
    # Gigabytes: parameters of the language model and of what generates, in bf16; rank 32 in fp32;
    # keys and values of an image, 40 + 576 tokens, in both rows.
    [("1B", 2.97, 0.121, 0.242), ("7B", 13.18, 0.300, 0.606)],
)
def test_the_published_models_have_their_sizes(size, policy, adapters, cached):
    planner = build_planner(f"deepseek-community/Janus-Pro-{size}")
    config = compose_config(None, f"janus_pro_{size.lower()}_24gb", PROMPTS)
    plan = ConfigPlanner(planner, prompt_tokens=40, is_on_accelerator=True).plan(config)
    items = {item.name: item for item in plan.items}
    assert items["language model and head"].by_phase["update"] == pytest.approx(
        policy * 1e9, rel=5e-3
    )
    assert items["adapters"].by_phase["update"] == pytest.approx(adapters * 1e9, rel=5e-3)
    at_once = config.rollout.batch_size
    assert items["cache of the samples"].by_phase["rollout"] == pytest.approx(
        at_once * cached * 1e9, rel=5e-3
    )
    # Published: 42.4 M in the decoder of the VQ, 29.3 M in its encoder, and the codebook.
    bytes_of = (planner.decoder(torch.bfloat16, None), planner.vision(torch.bfloat16))
    assert [each.size / 2e6 for each in bytes_of] == pytest.approx([42.5, 29.3], rel=1e-2)


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("1b_16", 16), ("1b_24", 24), ("7b_24", 24), ("7b_80", 80)]
)
def test_config_of_a_card_leaves_room_on_it(name, gigabytes):
    config = compose_config(None, f"janus_pro_{name}gb", PROMPTS)
    planner = build_planner(config.model.path)
    plan = ConfigPlanner(planner, prompt_tokens=100, is_on_accelerator=True).plan(config)
    assert plan.peak <= 0.92 * gigabytes * 10**9


def test_remedies_are_keys_that_this_family_has():
    config = compose_config(None, "janus_pro_7b_80gb", PROMPTS)
    planner = ConfigPlanner(
        build_planner(config.model.path), prompt_tokens=100, is_on_accelerator=True
    )
    advice = planner.advise(config, 24 * 10**9)
    changed = compose_config(None, "janus_pro_7b_80gb", [*PROMPTS, *advice.overrides])
    check_keys(changed)
    assert "rollout.batch_size=8" in advice.overrides
    assert planner.plan(changed).peak == advice.peak <= 24 * 10**9
    hopeless = planner.advise(config, 10**9)
    assert hopeless.overrides == ()


def test_guidance_doubles_the_rows():
    planner = build_planner("deepseek-community/Janus-Pro-1B")
    guided, plain = (
        update_activations(
            planner, config_of(f"rollout.guidance_scale={scale}"), BatchShape(1, 8, 1)
        )
        for scale in ("null", 1.0)
    )
    assert 1.5 < guided / plain < 2.0


def test_another_model_is_not_known_without_its_config():
    with pytest.raises(ConfigError, match="'someone/a-janus-of-their-own'.*Janus-Pro-1B"):
        build_planner("someone/a-janus-of-their-own")


@pytest.fixture(scope="module")
def wide():
    """Wide and deep enough for activations of the language model to be most of what is taken."""
    return build_model(side=8, layers=6, width=256)


def batch_of(group_size):
    return PromptBatch((Prompt("a", "a red cat"),), group_size, 64, 64, seed=0, decode_seeds=(0,))


@pytest.mark.parametrize(("is_checkpointing", "off"), [(False, 0.15), (True, 0.3)])
def test_update_activations_are_near_what_is_allocated(
    wide, loaded_janus, build_janus_policy, is_checkpointing, off
):
    parts = JanusPro(copy.deepcopy(wide), loaded_janus.processor)
    policy = build_janus_policy(parts, adapter_rank=8, is_checkpointing=is_checkpointing)
    batch = batch_of(8)
    rollout = Rollout(torch.zeros(1, 8, 64, dtype=torch.int64), torch.zeros(1, 8, 64), None)

    def replay():
        policy.replay(batch, rollout, torch.arange(8)).log_probs.sum().backward()

    # Gradients exist by then, as of the micro-batch before.
    replay()
    config = config_of(f"model.gradient_checkpointing={str(is_checkpointing).lower()}")
    planned = BatchShape(1, 8, policy.encode(batch).input_ids.shape[1])
    planner = JanusProPlanner(wide.config)
    assert update_activations(planner, config, planned) == pytest.approx(
        allocated_peak(replay), rel=off
    )


def test_rollout_bytes_are_near_what_is_allocated(wide, loaded_janus, build_janus_policy):
    policy = build_janus_policy(
        JanusPro(copy.deepcopy(wide), loaded_janus.processor), adapter_rank=8
    )
    batch = batch_of(8)
    planned = BatchShape(1, 8, policy.encode(batch).input_ids.shape[1])
    planner = JanusProPlanner(wide.config)
    measured = allocated_peak(lambda: policy.sample(batch))
    assert sum(rollout_bytes(planner, config_of(), planned)) == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize("batch_size", [None, 3])
def test_decode_bytes_are_near_what_is_allocated(wide, batch_size):
    decoder = JanusProDecoder(wide.model.vqmodel, batch_size=batch_size)
    ids = torch.zeros(1, 8, 64, dtype=torch.int64)
    config = config_of(f"decode.batch_size={batch_size or 'null'}")
    measured = allocated_peak(lambda: decoder.decode(batch_of(8), ids))
    # Convolutions on the CPU take scratch space, which is not counted.
    planned = JanusProPlanner(wide.config).decode_bytes(config, group_size=8, prompt_tokens=1)
    assert planned == pytest.approx(measured, rel=0.25)
