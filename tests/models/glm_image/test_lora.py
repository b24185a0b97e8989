"""Adapters in half precision round as those in fp32 do; in fp32 they are peft's, to the bit."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor

from glm_grpo.models import lora
from glm_grpo.models.find import find_model
from glm_grpo.models.glm_image.loading import load_pipeline
from glm_grpo.models.lora import AdaptedLinear
from glm_grpo.types import PromptBatch
from rewards.types import Prompt

RANK = 8


def adapted_layer(dtype: torch.dtype) -> AdaptedLinear:
    config = LoraConfig(r=RANK, lora_alpha=12, target_modules=["0"])
    config._register_custom_module({torch.nn.Linear: AdaptedLinear})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 96)).to(dtype)
        layer = get_peft_model(model, config).base_model.model[0]
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    return layer


def states_and_slopes(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2, 50, size, generator=generator).to(dtype) for size in (64, 96))


def test_layer_in_fp32_is_that_of_peft_to_the_bit() -> None:
    layer, (states, slopes) = adapted_layer(torch.float32), states_and_slopes(torch.float32)
    weights = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    ours, theirs = layer(states), LoraLinear.forward(layer, states)
    assert torch.equal(ours, theirs)
    for own, peft in zip(
        *(torch.autograd.grad(each, weights, slopes) for each in (ours, theirs)), strict=True
    ):
        assert torch.equal(own, peft)


def test_layer_in_half_is_as_near_to_the_exact_product_as_that_of_peft() -> None:
    layer, (states, slopes) = adapted_layer(torch.bfloat16), states_and_slopes(torch.bfloat16)
    weights = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    ours, theirs = layer(states), LoraLinear.forward(layer, states)
    base = layer.base_layer
    down, up = weights
    exact = torch.nn.functional.linear(states.double(), base.weight.double(), base.bias.double())
    exact += states.double() @ down.double().T @ up.double().T * 12 / RANK
    error, usual = ((each - exact).pow(2).mean().sqrt() for each in (ours, theirs))

    assert ours.dtype == torch.bfloat16
    assert error <= 1.1 * usual
    for own, peft in zip(
        *(torch.autograd.grad(each, weights, slopes) for each in (ours, theirs)), strict=True
    ):
        assert own.dtype == torch.float32
        assert torch.cosine_similarity(own.flatten(), peft.flatten(), dim=0) >= 0.999


def test_sampled_equals_replayed_as_closely_as_with_factors_in_fp32(
    build_policy, small_preview, monkeypatch
) -> None:
    words = ("AB", "WXYZ", "STOP", "LONG WORD")
    prompts = tuple(Prompt(word, f'a red sign saying "{word}"') for word in words)
    batch = PromptBatch(prompts, 16, 256, 256, seed=3, decode_seeds=(0,) * len(words))

    @torch.no_grad()
    def gap() -> Tensor:
        pipeline = load_pipeline(find_model("tiny").path, dtype=torch.bfloat16)
        policy = build_policy(pipeline, adapter_rank=RANK, adapter_alpha=2.0 * RANK)
        generator = torch.Generator().manual_seed(1)
        for up in policy.trainable_parameters()[1::2]:
            up.copy_(torch.randn(up.shape, generator=generator) * 0.03)
        rollout = policy.sample(batch)
        sampled = rollout.log_probs.flatten(0, 1)
        return policy.replay(batch, rollout, torch.arange(len(sampled))).log_probs - sampled

    ours = gap()
    monkeypatch.setattr(lora, "_HALF", ())
    usual = gap()

    assert ours.std() <= 1.1 * usual.std()
    assert abs(ours.exp().mean() - 1) <= 1e-3
    # Whole rows and single tokens round differently; else nothing was compared.
    assert usual.std() > 0
