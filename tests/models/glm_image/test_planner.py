"""What a run of GLM-Image takes: weights by hand, activations beside what is allocated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diffusers import AutoencoderKL, GlmImagePipeline

from glm_grpo.config import compose_config
from glm_grpo.errors import ConfigError, ModelError
from glm_grpo.models.glm_image.decoder import GlmImageDecoder
from glm_grpo.models.glm_image.files import PUBLISHED_ID
from glm_grpo.models.glm_image.planner import (
    GlmImagePlanner,
    PartConfigs,
    read_part_configs,
)
from glm_grpo.models.module_sizes import pinned
from glm_grpo.models.planning import OVERHEAD_BYTES, MemoryItem, MemoryPlan
from glm_grpo.plan.fit import ConfigPlanner
from glm_grpo.plan.memory import (
    BatchShape,
    bytes_in_4_bits,
    plan_memory,
    rollout_bytes,
    update_activations,
)
from glm_grpo.tiny.models import (
    PolicySizes,
    build_glyph_tokenizer,
    build_policy_model,
    build_processor,
    build_scheduler,
    build_text_encoder,
    build_transformer,
)
from glm_grpo.types import PromptBatch, Rollout
from rewards.types import Prompt
from tests.factories import CONFIG_DIR, allocated_peak, tiny_config

BATCH = BatchShape(prompts=1, group_size=4, prompt_tokens=30)
ADAPTER = "model.adapter={rank: 8, alpha: 16.0}"


def config_of(*overrides):
    """Full fine-tuning of 4 images of 64 x 64 in micro-batches of 2, without a KL."""
    step = ("rollout.prompts_per_step=1", "rollout.group_size=4", "eval.samples_per_prompt=1")
    size = ("rollout.height=64", "rollout.width=64", "train.micro_batch_size=2")
    model = ("model.adapter=null", "model.gradient_checkpointing=false", "loss.kl_coef=0")
    return tiny_config(*step, *size, *model, *overrides)


def plan(planner, *overrides, is_on_accelerator=True):
    return plan_memory(
        planner,
        config_of(*overrides),
        prompt_tokens=BATCH.prompt_tokens,
        is_on_accelerator=is_on_accelerator,
    )


@pytest.fixture(scope="module")
def planner(shallow_configs):
    return GlmImagePlanner(shallow_configs)


@pytest.fixture(scope="module")
def published():
    return GlmImagePlanner(read_part_configs(PUBLISHED_ID))


def item(planned: MemoryPlan, name: str) -> MemoryItem:
    return next(each for each in planned.items if each.name == name)


def test_pinned_bytes_are_powers_of_two_for_each_tensor():
    # 60 bytes -> 64; 12 -> 16; nothing takes nothing.
    assert pinned([60, 12, 0]) == 80


def test_a_matrix_in_4_bits_has_8_bit_scales_that_share_fp32_ones():
    # 64 x 512 entries: half a byte each, 512 blocks of 64; two scales of 256 of them, the tables of
    # 16 and 256 values and a mean, 4 bytes each.
    assert bytes_in_4_bits(64 * 512) == (16_384, 512, 4 * (2 + 16 + 256 + 1))


@pytest.mark.parametrize(
    ("name", "overrides", "measured"),
    [
        # GB allocated on an H200 (benchmarks/RESULTS.md), with the settings of that time.
        (
            "24gb",
            ("rollout.prompts_per_step=8", "train.micro_batch_size=2", *("512",) * 2),
            {"rollout": 19.8, "decode": 16.2, "update": 20.0},
        ),
        (
            "24gb",
            ("rollout.prompts_per_step=2", "train.micro_batch_size=1", *("1024",) * 2),
            {"rollout": 20.1, "decode": 20.2, "update": 21.7},
        ),
        (
            "80gb",
            ("rollout.prompts_per_step=8", "decode.vae_batch_size=1", *("512",) * 2),
            {"rollout": 35.0, "decode": 34.6},
        ),
        ("80gb", ("rollout.prompts_per_step=1", *("1024",) * 2), {"update": 60.3}),
    ],
    ids=["24 GB, 64 of 512", "24 GB, 16 of 1024", "80 GB, 64 of 512", "80 GB, 8 of 1024"],
)
def test_plan_is_within_8_percent_of_what_a_card_allocated(published, name, overrides, measured):
    *others, height, width = overrides
    config = compose_config(
        CONFIG_DIR,
        f"glm_image_{name}",
        [
            *("data.path=a.txt", "data.eval_path=b.txt", "rollout.group_size=8"),
            *(f"rollout.height={height}", f"rollout.width={width}", *others),
        ],
    )
    plan = ConfigPlanner(published, prompt_tokens=60, is_on_accelerator=True).plan(config)
    for phase, gigabytes in measured.items():
        allocated = (plan.total(phase) - OVERHEAD_BYTES) / 1e9
        assert allocated == pytest.approx(gigabytes, rel=0.08), phase


def test_plan_of_the_published_model_has_its_sizes(published):
    step = ("rollout.prompts_per_step=2", "rollout.height=512", "rollout.width=512")
    model = ("model.dtype=bfloat16", "model.adapter={rank: 32, alpha: 64.0}", "offload=modules")
    found = plan(published, *step, *model)
    # 8.847 B + 16512 x 4096 of the head, 2 bytes each; 40 layers, 2 heads of 128, 2 bytes:
    # 40,960 bytes a token, of which 8 images have 512.
    weights = item(found, "language model and head").by_phase["rollout"]
    assert weights == pytest.approx(17.83e9, rel=1e-3)
    assert item(found, "vision tower and VQ").cpu == pytest.approx(2.40e9, rel=1e-2)
    assert item(found, "cache of the samples").by_phase == {"rollout": 40_960 * 8 * 512}
    # 40 layers, 32 x (sides of q, k, v, o, gate and up, down), 4 bytes.
    sides = 2 * 8192 + 2 * (4096 + 256) + (4096 + 27_392) + (13_696 + 4096)
    assert item(found, "adapters").by_phase == dict.fromkeys(
        ("rollout", "update"), 40 * 32 * sides * 4
    )


@pytest.mark.parametrize(
    ("way", "off"),
    [
        ((), 0.2),
        ((ADAPTER,), 0.2),
        ((ADAPTER, "model.gradient_checkpointing=true"), 0.3),
    ],
    ids=["full", "adapters", "checkpointing"],
)
def test_update_activations_are_near_what_is_allocated(way, off, build_policy, as_experience):
    sizes = PolicySizes(
        hidden_size=256, intermediate_size=512, heads=8, key_value_heads=8, layers=6
    )
    config = config_of(*way)
    adapter = config.model.adapter
    model = build_policy_model(seed=0, sizes=sizes)
    parts = dict.fromkeys(("tokenizer", "text_encoder", "vae", "transformer", "scheduler"))
    policy = build_policy(
        GlmImagePipeline(processor=build_processor(sizes), vision_language_encoder=model, **parts),
        adapter_rank=None if adapter is None else adapter.rank,
        is_checkpointing=config.model.gradient_checkpointing,
    )
    batch = prompt_batch(group_size=config.train.micro_batch_size)
    prompt_tokens = policy.encode(batch).input_ids.shape[1]
    shape = (1, batch.group_size, policy.tokens_per_image(batch))
    rollout = Rollout(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape), None)
    experience = as_experience(batch, rollout)
    rows = torch.arange(config.train.micro_batch_size)

    def replay():
        scores = policy.replay(experience.prompts, experience.rollout, rows).log_probs
        torch.autograd.backward(scores.sum())

    # Gradients exist by then, as of the micro-batch before.
    replay()
    planner = GlmImagePlanner(PartConfigs(model.config.to_dict(), {}, {}, {}))
    planned = BatchShape(1, batch.group_size, prompt_tokens)
    assert update_activations(planner, config, planned) == pytest.approx(
        allocated_peak(replay), rel=off
    )


def test_rollout_bytes_are_near_what_is_allocated(random_pipeline_folder, policy, small_preview):
    batch = replace(prompt_batch(group_size=8), height=256, width=256)
    prompt_tokens = policy.encode(batch).input_ids.shape[1]
    config = config_of("rollout.height=256", "rollout.width=256")
    planner = GlmImagePlanner(read_part_configs(str(random_pipeline_folder)))
    measured = allocated_peak(lambda: policy.sample(batch))
    planned = BatchShape(1, 8, prompt_tokens)
    assert sum(rollout_bytes(planner, config, planned)) == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(
    ("decode_batch_size", "vae_batch_size", "num_sources", "guidance_scale"),
    [(None, None, 0, 1.0), (None, 4, 0, 1.0), (3, 1, 0, 1.5), (None, 1, 1, 1.5), (3, 3, 2, 1.0)],
    ids=["group", "VAE of four", "parts", "group of an edit", "parts of an edit"],
)
def test_decode_bytes_are_near_what_is_allocated(
    decode_batch_size, vae_batch_size, num_sources, guidance_scale
):
    # Channels in multiples of 16, which kernels on the CPU round others up to; the widest level
    # meets the largest image in the last block, as in the published VAE.
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 64, 128, 128),
        latent_channels=8,
        norm_num_groups=8,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        latents_mean=[0.0] * 8,
        latents_std=[1.0] * 8,
    ).eval()
    transformer, text_encoder = build_transformer(seed=0), build_text_encoder(seed=0)
    pipeline = GlmImagePipeline(
        tokenizer=build_glyph_tokenizer(),
        processor=None,
        text_encoder=text_encoder,
        vision_language_encoder=None,
        vae=vae,
        transformer=transformer,
        scheduler=build_scheduler(),
    )
    decoder = GlmImageDecoder(
        pipeline,
        steps=2,
        guidance_scale=guidance_scale,
        batch_size=decode_batch_size,
        vae_batch_size=vae_batch_size,
    )
    config = config_of(
        *("rollout.height=128", "rollout.width=128", f"data.sources={num_sources}"),
        f"decode.batch_size={decode_batch_size or 'null'}",
        f"decode.vae_batch_size={vae_batch_size or 'null'}",
    )
    source = torch.zeros(3, 128, 128, dtype=torch.uint8)
    ids = torch.zeros(1, num_sources, 16, dtype=torch.int64)
    batch = PromptBatch(
        (Prompt("sign", '"SIGN"', sources=(source,) * num_sources),),
        BATCH.group_size,
        128,
        128,
        seed=0,
        decode_seeds=(5,),
        source_token_ids=ids if num_sources else None,
    )
    tokens = torch.zeros(1, BATCH.group_size, 16 if num_sources else 272, dtype=torch.int64)
    planner = GlmImagePlanner(
        PartConfigs({}, dict(transformer.config), dict(vae.config), text_encoder.config.to_dict())
    )
    measured = allocated_peak(lambda: decoder.decode(batch, tokens))
    planned = planner.decode_bytes(config, group_size=BATCH.group_size, prompt_tokens=8)
    assert planned == pytest.approx(measured, rel=0.2)


def test_plan_offload_moves_weights_out_of_the_phases_that_do_without(planner):
    plans = {
        offload: plan(planner, f"offload={offload}")
        for offload in ("none", "modules", "modules_and_optimizer")
    }
    decoder = item(plans["none"], "decoder").by_phase["decode"]
    assert item(plans["none"], "decoder").by_phase["update"] == decoder
    assert item(plans["modules"], "decoder").by_phase == {"decode": decoder}
    assert item(plans["modules"], "decoder").cpu >= decoder
    state = item(plans["modules"], "optimizer state").by_phase["idle"]
    assert state > 0
    assert plans["modules"].total("idle") == state + OVERHEAD_BYTES
    assert plans["modules_and_optimizer"].total("idle") == OVERHEAD_BYTES
    moved = plans["modules_and_optimizer"].moved_in - plans["modules"].moved_in
    assert moved == state


def test_plan_of_edits_has_the_vision_tower_on_the_accelerator_for_its_phase(planner):
    size, edit = ("rollout.height=128", "rollout.width=128"), "data.sources=1"
    plain = plan(planner, *size)
    resident = plan(planner, *size, edit)
    moved = plan(planner, *size, edit, "offload=modules")
    name = "vision tower and VQ"
    size = item(plain, name).cpu
    assert "sources" not in plain.phases
    assert item(plain, name).by_phase == {}
    assert resident.phases[0] == "sources"
    assert item(resident, name).by_phase["update"] == size
    assert item(moved, name).by_phase == {"sources": size}
    assert item(moved, name).cpu >= size
    assert moved.total("sources") < moved.total("update")


def test_plan_without_an_accelerator_holds_everything_in_one_memory(planner):
    found = plan(planner, "offload=modules", is_on_accelerator=False)
    assert found.overhead == found.moved_in == 0
    in_peak = sum(item.by_phase.get(found.peak_phase, 0) for item in found.items)
    assert found.peak == found.cpu + in_peak
    assert item(found, "decoder").by_phase["update"] > 0


def test_plan_with_adapters_trains_two_factors_of_every_matrix(planner):
    one, two = (plan(planner, f"model.adapter={{rank: {rank}, alpha: 8.0}}") for rank in (4, 8))
    weights = item(one, "adapters").by_phase["idle"]
    assert item(two, "adapters").by_phase["idle"] == 2 * weights
    assert item(one, "gradients").by_phase == {"update": weights}
    assert item(one, "optimizer state").by_phase["idle"] == 2 * weights


def test_read_part_configs_refuses_a_model_it_cannot_know(tmp_path):
    with pytest.raises(ConfigError, match="someone/else.*config.json of every part"):
        read_part_configs("someone/else")
    with pytest.raises(ModelError, match=rf"{tmp_path}\S*config\.json"):
        read_part_configs(str(tmp_path))


def prompt_batch(*, group_size):
    prompt = Prompt("sign", 'a red sign with "OPEN" on it')
    return PromptBatch((prompt,), group_size, 64, 64, seed=0, decode_seeds=(0,))
