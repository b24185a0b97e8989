"""Fewer bits: the same as plain weights of the rounded values, and only adapters are trained."""

from __future__ import annotations

import copy

import pytest
import torch

from glm_grpo.config import compose_config
from glm_grpo.errors import ConfigError, ModelError
from glm_grpo.models import four_bits
from glm_grpo.models.find import find_model
from glm_grpo.models.glm_image import quantization
from glm_grpo.models.glm_image.decoder import GlmImageDecoder
from glm_grpo.models.glm_image.fast.captured_step import CapturedStep
from glm_grpo.models.glm_image.fast.stock_step import StockStep
from glm_grpo.models.glm_image.loading import load_pipeline
from glm_grpo.models.glm_image.planner import GlmImagePlanner, part_bytes, read_part_configs
from glm_grpo.models.glm_image.prefill import read_prompts
from glm_grpo.models.offload import ModulePart, scales
from glm_grpo.plan.memory import language_tensors, trained_bytes
from glm_grpo.setup.loading import load_models
from glm_grpo.setup.prepared_run import prepare
from glm_grpo.training.replay_check import compare_replay
from tests.factories import tiny_config


@pytest.fixture
def folder(random_pipeline_folder):
    return str(random_pipeline_folder)


def test_weights_in_4_bits_need_bitsandbytes(folder, monkeypatch):
    monkeypatch.setattr(four_bits, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(ModelError, match="'nf4': .*pip install bitsandbytes"):
        load_pipeline(folder, dtype=torch.float32, quantization="nf4")


def test_transformer_in_8_bits_draws_what_rounded_weights_draw(folder, loaded_pipeline, batch):
    token_ids = torch.randint(512, (2, 3, 272), generator=torch.Generator().manual_seed(0))
    held = load_pipeline(folder, dtype=torch.float32, decoder_quantization="float8")
    rounded = copy.deepcopy(loaded_pipeline)
    plain_bytes = part_bytes([rounded.transformer]).size
    in_8_bits = dict(held.transformer.named_parameters())
    for name, weight in rounded.transformer.named_parameters():
        weight.data = weight.data.to(in_8_bits[name].dtype).float()

    pixels = GlmImageDecoder(held, steps=1, guidance_scale=1.5).decode(batch, token_ids).pixels

    expected, plain = (
        GlmImageDecoder(each, steps=1, guidance_scale=1.5).decode(batch, token_ids).pixels.int()
        for each in (rounded, loaded_pipeline)
    )
    # Some processors multiply weights in a new place in another order.
    assert (pixels.int() - expected).abs().max() <= 1
    assert (pixels.int() - plain).abs().max() > 5
    assert held.transformer.transformer_blocks[0].ff.net[2].weight.dtype == torch.float8_e4m3fn
    # Norms with what modulates them, the first and the last layer keep 4 bytes a weight.
    assert part_bytes([held.transformer]).size < 0.5 * plain_bytes


def test_build_stage_refuses_4_bits_without_an_accelerator(configs_dir):
    overrides = ["model.quantization=nf4", "model.adapter={rank: 4, alpha: 8.0}"]
    config = compose_config(configs_dir, "tiny", overrides)
    with pytest.raises(ConfigError, match="model.quantization.*'nf4'.*accelerator"):
        load_models(config, find_model("tiny"), torch.device("cpu"))


def test_build_stage_holds_the_transformer_in_8_bits(configs_dir):
    config = compose_config(configs_dir, "tiny", ["decode.quantization=float8"])
    _, transformer, _ = prepare(config).load().decoder.modules()
    assert torch.float8_e4m3fn in {weight.dtype for weight in transformer.parameters()}


@pytest.fixture
def bitsandbytes(monkeypatch):
    module = pytest.importorskip("bitsandbytes")
    # Its layout for AVX-512 does without the code that accelerators run, and needs rows whose
    # length is a multiple of a block.
    monkeypatch.setattr(module.nn.modules, "has_avx512bf16", lambda: False)
    return module


@pytest.fixture
def pipeline_in_4_bits(folder, bitsandbytes):
    return load_pipeline(folder, dtype=torch.float32, quantization="nf4")


@pytest.mark.long
def test_weights_are_quantised_on_the_device_of_the_run(bitsandbytes, configs_dir, monkeypatch):
    card = torch.device("cuda", 1)
    options = four_bits.options_for_4_bits(torch.bfloat16, card, kept=quantization.KEPT_MODULES)
    assert options["device_map"] == {"": card}
    asked = {}

    def load(path, **options):
        asked.update(options)
        raise ModelError("stops here")

    monkeypatch.setattr("glm_grpo.models.glm_image.family.load_pipeline", load)
    overrides = ["model.quantization=nf4", "model.adapter={rank: 4, alpha: 8.0}"]
    config = compose_config(configs_dir, "tiny", overrides)
    with pytest.raises(ModelError, match="stops here"):
        load_models(config, find_model("tiny"), card)
    assert asked["quantize_on"] == card


@pytest.fixture
def adapted_policy(build_policy):
    """Builds a policy whose adapters change what it gives."""

    def build(pipeline):
        policy = build_policy(pipeline, adapter_rank=4, is_checkpointing=True)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in policy.trainable_parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
        return policy

    return build


def _in_full(pipeline, loaded_pipeline, bitsandbytes):
    """A plain pipeline with the values the matrices of 4 bits stand for."""
    plain = copy.deepcopy(loaded_pipeline)
    matrices = dict(pipeline.vision_language_encoder.named_modules())
    for name, module in plain.vision_language_encoder.named_modules():
        packed = matrices[name]
        if isinstance(packed, bitsandbytes.nn.Linear4bit):
            module.weight.data = bitsandbytes.functional.dequantize_4bit(
                packed.weight.data, packed.weight.quant_state
            )
    return plain


@pytest.mark.long
def test_only_matrices_of_the_layers_are_in_4_bits(pipeline_in_4_bits, bitsandbytes):
    model = pipeline_in_4_bits.vision_language_encoder
    in_4_bits = {
        name
        for name, module in model.named_modules()
        if isinstance(module, bitsandbytes.nn.Linear4bit)
    }
    # Four layers of q, k, v, o, gate and up in one, down.
    assert len(in_4_bits) == 24
    assert all(name.startswith("model.language_model.layers.") for name in in_4_bits)
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.long
def test_replay_in_4_bits_equals_sampling(pipeline_in_4_bits, adapted_policy, batch, small_preview):
    policy = adapted_policy(pipeline_in_4_bits)
    rollout = policy.sample(batch)
    rows = torch.arange(6)

    replayed = policy.replay(batch, rollout, rows).log_probs.detach()

    assert torch.allclose(replayed, rollout.log_probs.flatten(0, 1), atol=1e-4)
    reference = policy.reference_log_probs(batch, rollout, rows)
    assert not torch.allclose(replayed, reference, atol=1e-2)


@pytest.mark.long
def test_policy_in_4_bits_equals_plain_weights_of_those_values(
    pipeline_in_4_bits, loaded_pipeline, bitsandbytes, adapted_policy, batch, small_preview
):
    plain = adapted_policy(_in_full(pipeline_in_4_bits, loaded_pipeline, bitsandbytes))
    ours = adapted_policy(pipeline_in_4_bits)
    rollout = plain.sample(batch)
    scored = []
    for policy in (plain, ours):
        log_probs = policy.replay(batch, rollout, torch.arange(6)).log_probs
        log_probs.mean().backward()
        scored.append(log_probs.detach())

    assert torch.allclose(*scored, atol=1e-4)
    trained = {name for name, weight in ours.model.named_parameters() if weight.grad is not None}
    assert trained
    assert all("lora_" in name for name in trained)
    for ours_weight, plain_weight in zip(
        ours.trainable_parameters(), plain.trainable_parameters(), strict=True
    ):
        assert torch.allclose(ours_weight.grad, plain_weight.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.long
def test_plan_knows_the_bytes_of_weights_in_4_bits(pipeline_in_4_bits, adapted_policy, folder):
    held = pipeline_in_4_bits.vision_language_encoder
    options = ("model.quantization=nf4", "model.adapter={rank: 4, alpha: 8.0}")
    settings = tiny_config(*options).model
    language = GlmImagePlanner(read_part_configs(folder)).language
    planned = sum(language_tensors(language, settings)) + trained_bytes(language, settings)
    policy = adapted_policy(pipeline_in_4_bits)
    weights = [weight for module in policy.modules() for weight in module.parameters()]
    beside = sum(each.nbytes for weight in held.parameters() for each in scales(weight))
    assert planned == sum(weight.nbytes for weight in weights) + beside


def _down_projection(pipeline):
    return pipeline.vision_language_encoder.model.language_model.layers[0].mlp.down_proj


@pytest.mark.long
def test_module_part_keeps_scales_with_their_weights(pipeline_in_4_bits):
    layer = _down_projection(pipeline_in_4_bits)
    states = torch.randn(3, layer.in_features)
    before = layer(states)
    part = ModulePart([layer], device=torch.device("cpu"))

    part.load()
    # The weight; its scales, the table of values, and of the scales: scale, table and mean.
    tensors = [*layer.parameters(), *scales(layer.weight)]
    assert len(tensors) == 6
    for tensor in tensors:
        tensor.data = torch.zeros_like(tensor.data)
    part.evict()

    assert torch.equal(layer(states), before)


@pytest.mark.gpu
@pytest.mark.long
def test_module_part_moves_weights_in_4_bits_with_their_scales(pipeline_in_4_bits):
    layer = _down_projection(pipeline_in_4_bits)
    states = torch.randn(3, layer.in_features)
    before = layer(states)
    part = ModulePart([layer], device=torch.device("cuda"))

    part.load()
    tensors = [*layer.parameters(), *scales(layer.weight)]
    assert {tensor.device.type for tensor in tensors} == {"cuda"}
    assert torch.allclose(layer(states.cuda()).cpu(), before, atol=1e-4)
    part.evict()

    assert {tensor.device.type for tensor in tensors} == {"cpu"}


@pytest.fixture
def pipeline_quantised_on_the_card(folder, bitsandbytes):
    return load_pipeline(
        folder, dtype=torch.bfloat16, quantization="nf4", quantize_on=torch.device("cuda")
    )


@pytest.mark.gpu
@pytest.mark.long
def test_weights_quantised_on_the_card_are_those_of_the_cpu(
    pipeline_quantised_on_the_card, folder, bitsandbytes
):
    on_cpu = load_pipeline(folder, dtype=torch.bfloat16, quantization="nf4")
    theirs = dict(on_cpu.vision_language_encoder.named_parameters())
    for name, ours in pipeline_quantised_on_the_card.vision_language_encoder.named_parameters():
        tensors = [ours, *scales(ours)]
        assert {tensor.device.type for tensor in tensors} == {"cpu"}
        if not isinstance(ours, bitsandbytes.nn.Params4bit):
            assert torch.equal(ours, theirs[name])
            continue
        values = [
            bitsandbytes.functional.dequantize_4bit(each.data, each.quant_state)
            for each in (ours, theirs[name])
        ]
        # A value half way between two levels, or a scale, may be rounded to the other side.
        differing = (values[0] != values[1]).float().mean()
        assert differing < 1e-3 or torch.allclose(*values, rtol=2e-2, atol=1e-3)
    # accelerate's hooks would move modules by themselves.
    modules = pipeline_quantised_on_the_card.vision_language_encoder.modules()
    assert not any(hasattr(module, "_hf_hook") for module in modules)


@pytest.mark.gpu
@torch.inference_mode()
def test_captured_step_equals_the_stock_one_in_4_bits(
    pipeline_quantised_on_the_card, adapted_policy, batch, small_preview
):
    # bitsandbytes issue 1308: wrong values where its products are captured as a CUDA graph.
    policy = adapted_policy(pipeline_quantised_on_the_card)
    for module in policy.modules():
        module.to("cuda")
    group = batch.group_size
    prompts = read_prompts(policy.network, policy.encode(batch), batch)
    captured, stock = (build(policy.network, prompts, group) for build in (CapturedStep, StockStep))
    generator = torch.Generator().manual_seed(2)
    for _ in range(8):
        token_ids = torch.randint(512, (len(batch.prompts) * group,), generator=generator).cuda()
        found, expected = captured(token_ids), stock(token_ids)
        assert (found - expected).abs().max() <= 5e-2 * expected.abs().max()


@pytest.mark.long
def test_first_layers_of_4_bit_weights_compute_in_float32(
    folder, bitsandbytes, build_policy, batch, small_preview
):
    pipeline = load_pipeline(folder, dtype=torch.bfloat16, quantization="nf4")
    policy = build_policy(pipeline, adapter_rank=4)

    first = policy.first_layers(2)

    assert not any(
        isinstance(module, bitsandbytes.nn.Linear4bit) for module in first.network.modules()
    )
    report = compare_replay(first, batch, first.sample(batch), torch.arange(6))
    assert report.mean_gap < 1e-5
    # Those of the policy stay as they are.
    layers = policy.network.language_model.layers
    assert len(layers) == 4
    assert isinstance(layers[0].mlp.down_proj.base_layer, bitsandbytes.nn.Linear4bit)
