"""The step of a CUDA graph reads what the eager one reads, and is chosen only if it does."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from glm_grpo.models import adapted_policy
from glm_grpo.models.janus_pro import token_step
from glm_grpo.models.janus_pro.loading import JanusPro
from glm_grpo.models.janus_pro.token_step import CapturedStep, FixedShapesStep, TokenStep


@pytest.mark.parametrize("scale", [5.0, 1.0])
@pytest.mark.parametrize("rows", [slice(None), slice(0, 1)], ids=["padded", "one prompt"])
def test_fixed_shapes_draw_the_same_tokens(make_janus_policy, janus_batch, scale, rows):
    batch = type(janus_batch)(
        janus_batch.prompts[rows], 3, 32, 32, seed=0, decode_seeds=janus_batch.decode_seeds[rows]
    )
    policy = make_janus_policy(guidance_scale=scale, adapter_rank=4)
    policy._build_step = TokenStep
    eager = policy.sample(batch)
    policy._build_step = FixedShapesStep
    fixed = policy.sample(batch)
    assert torch.equal(eager.token_ids, fixed.token_ids)
    assert torch.allclose(eager.log_probs, fixed.log_probs, atol=1e-4)


def test_fixed_shapes_have_four_widths(make_janus_policy, janus_batch, monkeypatch):
    policy = make_janus_policy()
    widths = []
    read = FixedShapesStep._read

    def watch(step, token_ids, mask, position_ids):
        widths.append(mask.shape[-1])
        return read(step, token_ids, mask, position_ids)

    monkeypatch.setattr(FixedShapesStep, "_read", watch)
    policy._build_step = FixedShapesStep
    policy.sample(janus_batch)
    length = policy.encode(janus_batch).input_ids.shape[1]
    # 15 of 16 tokens are read, in quarters of 4.
    assert [width - length for width in widths] == [*[4] * 4, *[8] * 4, *[12] * 4, *[15] * 3]


def test_a_step_that_differs_is_not_chosen(make_janus_policy, janus_batch, monkeypatch, caplog):
    policy = make_janus_policy()
    # Everything of the choice but the accelerator.
    monkeypatch.setattr(token_step, "CapturedStep", FixedShapesStep)
    monkeypatch.setattr(token_step, "captures", lambda device: True)
    policy.sample(janus_batch)
    assert policy._build_step is FixedShapesStep

    class Shifted(FixedShapesStep):
        def _read_next(self, token_ids):
            return super()._read_next(token_ids) + 1.0

    monkeypatch.setattr(token_step, "CapturedStep", Shifted)
    policy = make_janus_policy()
    policy.sample(janus_batch)
    assert policy._build_step is TokenStep
    assert "hidden states differ" in caplog.text


class Casts(TorchDispatchMode):
    """Counts how often fp32 tensors of two dimensions, which only adapters have, are cast."""

    number = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        is_cast = operation is torch.ops.aten.to.dtype and args[1] == torch.bfloat16
        self.number += is_cast and args[0].dtype == torch.float32 and args[0].dim() == 2
        return operation(*args, **kwargs or {})


def test_adapters_are_cast_once_a_rollout(
    build_janus_policy, loaded_janus, janus_batch, monkeypatch
):
    model = copy.deepcopy(loaded_janus.model).to(torch.bfloat16)
    policy = build_janus_policy(JanusPro(model, loaded_janus.processor), adapter_rank=4)

    def sample_after(change):
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in policy.trainable_parameters():
                weight += change * torch.randn(weight.shape, generator=generator)
        with Casts() as casts:
            return policy.sample(janus_batch), casts.number

    for _ in range(2):
        rollout, casts = sample_after(0.1)
        # Two factors of each of 14 layers; 15 of 16 tokens are read, after the prompts.
        monkeypatch.setattr(adapted_policy, "held_factors", lambda model: nullcontext())
        usual, usual_casts = sample_after(0.0)
        monkeypatch.undo()
        assert usual_casts - casts == 2 * 14 * 15
        assert torch.equal(rollout.token_ids, usual.token_ids)
        assert torch.equal(rollout.log_probs, usual.log_probs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_step_is_chosen_on_an_accelerator(make_janus_policy, janus_batch, dtype):
    if not torch.cuda.is_available():
        pytest.skip("no accelerator")
    policy = make_janus_policy(adapter_rank=4)
    policy.model.to("cuda", dtype)
    captured = policy.sample(janus_batch)
    assert policy._build_step is CapturedStep
    replay = policy.replay(janus_batch, captured, torch.arange(9)).log_probs.cpu()
    gap = (replay - captured.log_probs.flatten(0, 1)).abs().mean()
    assert gap < (1e-3 if dtype == torch.float32 else 5e-2)
    again = policy.sample(janus_batch)
    assert torch.equal(again.token_ids, captured.token_ids)
