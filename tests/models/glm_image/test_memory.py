from dataclasses import replace

import pytest
import torch
from diffusers import AutoencoderKL, GlmImagePipeline
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile

from glm_grpo.errors import ConfigError, ModelError
from glm_grpo.models.base import Quantization
from glm_grpo.models.glm_image.decoder import GlmImageDecoder
from glm_grpo.models.glm_image.memory import (
    GlmImagePlanner,
    _update,
    decode_bytes,
    rollout_bytes,
    sources_bytes,
    update_bytes,
)
from glm_grpo.models.glm_image.meta import (
    META,
    PUBLISHED_ID,
    PartConfigs,
    measured_on_meta,
    pinned_bytes,
    read_part_configs,
)
from glm_grpo.models.glm_image.prompt_inputs import tokens_of_patches
from glm_grpo.models.glm_image.token_grid import token_layout
from glm_grpo.models.planning import OVERHEAD_BYTES, BatchSizes, ModelSettings, ScorerSizes
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

MODEL = ModelSettings(
    dtype=torch.float32,
    adapter_rank=None,
    is_checkpointing=False,
    needs_reference=False,
    is_on_accelerator=False,
)
SIZES = BatchSizes(
    prompts=1,
    group_size=4,
    height=64,
    width=64,
    prompt_tokens=30,
    micro_batch_size=2,
    is_truncated=False,
)
PUBLISHED = replace(MODEL, dtype=torch.bfloat16, adapter_rank=32, is_on_accelerator=True)


@pytest.fixture(scope="module")
def tiny_configs(random_pipeline_folder):
    return read_part_configs(str(random_pipeline_folder))


@pytest.fixture(scope="module")
def planner(shallow_configs):
    """Plans for one test serve the next."""
    return GlmImagePlanner(shallow_configs)


def _item(plan, name):
    return next(item for item in plan.items if item.name == name)


def test_measured_on_meta_counts_what_lives_at_the_same_time():
    with measured_on_meta() as memory:
        first = torch.empty(100, device=META)  # 400 bytes
        second = first * 2  # 400 more
        del first
        third = second[:50].exp()  # 200 beside second's 400
    assert memory.peak_bytes == 800
    assert memory.live_bytes == 600
    del third


def test_pinned_bytes_are_powers_of_two_for_each_tensor():
    # Weight 3 x 5 in fp32 is 60 bytes -> 64; bias of 3 is 12 -> 16.
    assert pinned_bytes([torch.nn.Linear(5, 3)]) == 80


def _allocated_peak(work):
    """By torch's own CPU allocator, above what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    live = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


SIZES_OF_POLICIES = {
    "tiny": PolicySizes(),
    "wide": PolicySizes(
        hidden_size=256, intermediate_size=512, heads=8, key_value_heads=8, layers=3
    ),
    "deep": PolicySizes(codebook=2048, heads=4, key_value_heads=2, hidden_size=128, layers=7),
}
WAYS_TO_TRAIN = {
    "full": {},
    "adapters": {"adapter_rank": 8},
    "checkpointing": {"adapter_rank": 8, "is_checkpointing": True},
}


@pytest.mark.parametrize(
    ("size", "way"),
    [
        ("tiny", "full"),
        ("wide", "adapters"),
        ("deep", "checkpointing"),
    ],
)
def test_update_bytes_match_the_allocator_within_ten_percent(
    size, way, build_policy, as_experience
):
    sizes, settings = SIZES_OF_POLICIES[size], replace(MODEL, **WAYS_TO_TRAIN[way])
    model = build_policy_model(seed=0, sizes=sizes)
    policy = build_policy(
        GlmImagePipeline(
            tokenizer=None,
            processor=build_processor(sizes),
            text_encoder=None,
            vision_language_encoder=model,
            vae=None,
            transformer=None,
            scheduler=None,
        ),
        adapter_rank=settings.adapter_rank,
        is_checkpointing=settings.is_checkpointing,
        needs_reference=False,
    )
    batch = _prompt_batch(group_size=SIZES.micro_batch_size)
    prompt_tokens = policy.encode(batch).input_ids.shape[1]
    # Which tokens are replayed takes no more and no less memory.
    shape = (1, batch.group_size, token_layout(batch.height, batch.width).num_tokens)
    rollout = Rollout(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape), None)
    experience = as_experience(batch, rollout)
    optimizer = AdamW(policy.trainable_parameters())

    def update():
        rows = torch.arange(SIZES.micro_batch_size)
        torch.autograd.backward(
            policy.replay(experience.prompts, experience.rollout, rows).log_probs.sum()
        )
        optimizer.step()

    # Optimizer state is made in the first step and counted apart; one micro-batch finds none of
    # the others' gradients.
    update()
    optimizer.zero_grad(set_to_none=True)
    planned = replace(SIZES, group_size=SIZES.micro_batch_size, prompt_tokens=prompt_tokens)
    configs = PartConfigs(model.config.to_dict(), {}, {}, {})
    assert update_bytes(configs, settings, planned) == pytest.approx(
        _allocated_peak(update), rel=0.1
    )


def test_rollout_bytes_match_the_allocator_within_ten_percent(tiny_configs, policy, small_preview):
    batch = replace(_prompt_batch(group_size=8), height=256, width=256)
    prompt_tokens = policy.encode(batch).input_ids.shape[1]
    sizes = {"group_size": 8, "height": 256, "width": 256}
    planned = replace(SIZES, prompt_tokens=prompt_tokens, **sizes)
    measured = _allocated_peak(lambda: policy.sample(batch))
    assert rollout_bytes(tiny_configs, MODEL, planned) == pytest.approx(measured, rel=0.1)


def test_rollout_bytes_of_edits_match_the_allocator_within_ten_percent(tiny_configs, policy):
    source = torch.zeros(3, 128, 128, dtype=torch.uint8)
    prompt = Prompt("edit", "make it red", sources=(source, source))
    batch = policy.encode_sources(PromptBatch((prompt,), 8, 128, 128, seed=0, decode_seeds=(0,)))
    inputs = policy.encode(batch)
    # Two sources of 16 tokens, each between two others.
    prompt_tokens = inputs.input_ids.shape[1] - 2 * 18
    sizes = {"group_size": 8, "height": 128, "width": 128, "num_sources": 2}
    planned = replace(SIZES, prompt_tokens=prompt_tokens, **sizes)
    measured = _allocated_peak(lambda: policy.sample(batch))
    assert rollout_bytes(tiny_configs, MODEL, planned) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("side", [128, 256])
def test_sources_bytes_match_the_allocator_within_ten_percent(side):
    model = build_policy_model(seed=0)
    picture = torch.zeros(3, side, side, dtype=torch.uint8)
    made = build_processor().image_processor(images=[picture], return_tensors="pt")

    def encode():
        with torch.no_grad():
            # Patches are made by numpy, and copied where the tower is.
            tokens_of_patches(model, made["pixel_values"].clone(), made["image_grid_thw"])

    configs = PartConfigs(model.config.to_dict(), {}, {}, {})
    planned = sources_bytes(configs, MODEL.dtype, side, side)
    assert planned == pytest.approx(_allocated_peak(encode), rel=0.1)


@pytest.mark.parametrize(
    ("decode_batch_size", "vae_batch_size", "num_sources", "guidance_scale"),
    [(None, None, 0, 1.0), (None, 4, 0, 1.0), (3, 1, 0, 1.5), (None, 1, 1, 1.5), (3, 3, 2, 1.0)],
    ids=["group", "VAE of four", "parts", "group of an edit", "parts of an edit"],
)
def test_decode_bytes_match_the_allocator_within_ten_percent(
    decode_batch_size, vae_batch_size, num_sources, guidance_scale
):
    # Channels in multiples of 16, which kernels on the CPU round others up to; the widest level
    # meets the largest picture in the last block, as in the published VAE.
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
    planned = replace(
        SIZES,
        height=128,
        width=128,
        prompt_tokens=8,
        decode_batch_size=decode_batch_size,
        vae_batch_size=vae_batch_size,
        num_sources=num_sources,
    )
    source = torch.zeros(3, 128, 128, dtype=torch.uint8)
    ids = torch.zeros(1, num_sources, 16, dtype=torch.int64)
    batch = PromptBatch(
        (Prompt("sign", '"SIGN"', sources=(source,) * num_sources),),
        planned.group_size,
        128,
        128,
        seed=0,
        decode_seeds=(5,),
        source_token_ids=ids if num_sources else None,
    )
    tokens = torch.zeros(1, planned.group_size, 16 if num_sources else 272, dtype=torch.int64)
    configs = PartConfigs(
        {}, dict(transformer.config), dict(vae.config), text_encoder.config.to_dict()
    )
    measured = _allocated_peak(lambda: decoder.decode(batch, tokens))
    assert decode_bytes(configs, MODEL, planned) == pytest.approx(measured, rel=0.1)


def test_decode_bytes_of_a_transformer_in_8_bits_hold_one_layer_in_full(tiny_configs):
    # One patch: what is cast is more than what is drawn takes.
    sizes = replace(SIZES, group_size=2, height=32, width=32, prompt_tokens=1)
    held = replace(MODEL, quantization=Quantization(decoder="float8"))
    vae = replace(tiny_configs, vae=tiny_configs.vae | {"block_out_channels": (8, 8, 8, 8)})
    plain, cast = (decode_bytes(vae, model, sizes) for model in (MODEL, held))
    largest = max(p.numel() for p in build_transformer(seed=0).parameters())
    assert plain < cast <= plain + 4 * largest


def test_update_bytes_of_a_deep_model_equal_those_of_all_its_layers():
    sizes = PolicySizes(layers=5)
    configs = PartConfigs(build_policy_model(seed=0, sizes=sizes).config.to_dict(), {}, {}, {})
    settings = replace(MODEL, adapter_rank=4, is_checkpointing=True)
    assert update_bytes(configs, settings, SIZES) == max(_update(configs, settings, SIZES, 5))


def test_plan_of_the_published_model_has_its_sizes(shallow_configs):
    # With a decoder that is planned in no time.
    parts = read_part_configs(PUBLISHED_ID)
    parts = replace(parts, transformer=shallow_configs.transformer, vae=shallow_configs.vae)
    plan = GlmImagePlanner(parts).plan(
        PUBLISHED, replace(SIZES, height=512, width=512, prompts=2), ScorerSizes(), "modules"
    )
    # 8.847 B + 16512 x 4096 of the head, 2 bytes each; 40 layers, 2 heads of 128, 2 bytes:
    # 40,960 bytes a token, of which 8 images have 512.
    assert _item(plan, "language model and head").by_phase["rollout"] == pytest.approx(
        17.83e9, rel=1e-3
    )
    assert _item(plan, "vision tower and VQ").cpu == pytest.approx(2.40e9, rel=1e-2)
    assert _item(plan, "cache of the samples").by_phase == {"rollout": 40_960 * 8 * 512}


def test_plan_offload_moves_weights_out_of_the_phases_that_do_without(planner):
    model = replace(MODEL, is_on_accelerator=True)
    plans = {
        offload: planner.plan(model, SIZES, ScorerSizes(movable=1000), offload)
        for offload in ("none", "modules", "modules_and_optimizer")
    }
    decoder = _item(plans["none"], "decoder").by_phase["decode"]
    assert _item(plans["none"], "decoder").by_phase["update"] == decoder
    assert _item(plans["modules"], "decoder").by_phase == {"decode": decoder}
    assert _item(plans["modules"], "decoder").cpu >= decoder
    state = _item(plans["modules"], "optimizer state").by_phase["idle"]
    assert state > 0
    assert plans["modules"].total("idle") == state + OVERHEAD_BYTES
    assert plans["modules_and_optimizer"].total("idle") == OVERHEAD_BYTES
    moved = plans["modules_and_optimizer"].moved_in - plans["modules"].moved_in
    assert moved == state


def test_plan_of_edits_has_the_vision_tower_on_the_accelerator_for_its_phase(planner):
    model = replace(MODEL, is_on_accelerator=True)
    sizes = replace(SIZES, height=128, width=128)
    plain, resident, moved = (
        planner.plan(model, each, ScorerSizes(), offload)
        for each, offload in (
            (sizes, "none"),
            (replace(sizes, num_sources=1), "none"),
            (replace(sizes, num_sources=1), "modules"),
        )
    )
    name = "vision tower and VQ"
    size = _item(plain, name).cpu
    assert "sources" not in plain.phases
    assert _item(plain, name).by_phase == {}
    assert resident.phases[0] == "sources"
    assert _item(resident, name).by_phase["update"] == size
    assert _item(moved, name).by_phase == {"sources": size}
    assert _item(moved, name).cpu >= size
    assert moved.total("sources") < moved.total("update")


def test_plan_without_an_accelerator_holds_everything_in_one_memory(planner):
    plan = planner.plan(MODEL, SIZES, ScorerSizes(on_cpu=500), "modules")
    assert plan.overhead == plan.moved_in == 0
    assert plan.peak == plan.cpu + sum(item.by_phase.get(plan.peak_phase, 0) for item in plan.items)
    assert _item(plan, "decoder").by_phase["update"] > 0


def test_plan_with_adapters_trains_two_factors_of_every_matrix(planner):
    one, two = (
        planner.plan(replace(MODEL, adapter_rank=rank), SIZES, ScorerSizes(), "none")
        for rank in (4, 8)
    )
    weights = _item(one, "adapters").by_phase["idle"]
    assert _item(two, "adapters").by_phase["idle"] == 2 * weights
    assert _item(one, "gradients").by_phase == {"update": weights}
    assert _item(one, "optimizer state").by_phase["idle"] == 2 * weights


def test_plan_has_the_activations_of_every_phase(planner, shallow_configs):
    plan = planner.plan(MODEL, SIZES, ScorerSizes(), "none")
    activations = _item(plan, "activations").by_phase
    caches = sum(
        _item(plan, f"cache of the {of}").by_phase["rollout"] for of in ("prompts", "samples")
    )
    assert activations["rollout"] == rollout_bytes(shallow_configs, MODEL, SIZES) - caches
    assert activations["decode"] == decode_bytes(shallow_configs, MODEL, SIZES)
    gradients = _item(plan, "gradients").by_phase["update"]
    assert activations["update"] == update_bytes(shallow_configs, MODEL, SIZES) - gradients


def test_read_part_configs_refuses_a_model_it_cannot_know(tmp_path):
    with pytest.raises(ConfigError, match="someone/else.*config.json of every part"):
        read_part_configs("someone/else")
    with pytest.raises(ModelError, match="config.json: no such file"):
        read_part_configs(str(tmp_path))


def _prompt_batch(*, group_size):

    prompt = Prompt("sign", 'a red sign with "OPEN" on it')
    return PromptBatch((prompt,), group_size, 64, 64, seed=0, decode_seeds=(0,))
