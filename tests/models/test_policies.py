"""What every family promises: what is sampled is what is replayed, learned and stored."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from glm_grpo.config import AdapterSection
from glm_grpo.errors import CheckpointError, ModelError, NonFiniteError
from glm_grpo.models import sampling, token_step
from glm_grpo.models.find import find_model
from glm_grpo.models.glm_image import loading as glm_image_loading
from glm_grpo.models.glm_image.fast import captured_step
from glm_grpo.models.glm_image.policy import GlmImagePolicy
from glm_grpo.models.janus_pro import loading as janus_pro_loading
from glm_grpo.models.janus_pro import token_step as janus_token_step
from glm_grpo.models.sampling import Truncation
from tests.factories import tiny_config

pytestmark = pytest.mark.usefixtures("small_preview")

ROWS = torch.tensor([0, 2, 4, 5])
"""Of prompts x 3 samples: two of each of the first prompts."""

CAPTURED = {
    "GLM-Image": captured_step.CapturedStep,
    "Janus-Pro": janus_token_step.CapturedStep,
}

FIRST = torch.arange(3)
"""The samples of the first prompt."""


@pytest.fixture(params=["GLM-Image", "Janus-Pro"])
def family(request):
    return request.param


@pytest.fixture
def make_policy(family, make_policy, make_janus_policy):
    return make_policy if family == "GLM-Image" else make_janus_policy


@pytest.fixture
def batch(family, batch, janus_batch):
    return batch if family == "GLM-Image" else janus_batch


@pytest.fixture
def load_policy(family, request):
    """Builds a policy with adapters on weights loaded in a dtype."""
    names, loading = {
        "GLM-Image": (("random_pipeline_folder", "build_policy"), glm_image_loading),
        "Janus-Pro": (("janus_folder", "build_janus_policy"), janus_pro_loading),
    }[family]
    folder, build = map(request.getfixturevalue, names)

    def load(dtype):
        return build(loading.load_pipeline(str(folder), dtype=dtype), adapter_rank=4)

    return load


@pytest.mark.parametrize(
    ("truncation", "temperature", "adapter_rank"),
    [
        (Truncation(), 0.7, 4),
        (Truncation(top_p=0.75), 0.9, None),
        (Truncation(top_k=20, min_p=0.01), 1.0, 4),
    ],
)
def test_replayed_log_probs_equal_sampled_ones(
    make_policy, batch, truncation, temperature, adapter_rank
):
    batch = replace(batch, height=96, width=160)
    policy = make_policy(temperature=temperature, adapter_rank=adapter_rank, truncation=truncation)
    rollout = policy.sample(batch)

    replay = policy.replay(batch, rollout, ROWS)

    assert torch.allclose(replay.log_probs, rollout.log_probs.flatten(0, 1)[ROWS], atol=1e-4)


def test_adapters_on_some_layers_are_sampled_replayed_and_planned(
    make_policy, batch, family, request
):
    policy = make_policy(adapter_rank=4, target_modules="[q_proj,v_proj]")
    trained = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trained} == {"q_proj", "v_proj"}
    for weight in trained.values():
        torch.nn.init.normal_(weight, std=0.1)
    rollout = policy.sample(batch)

    replay = policy.replay(batch, rollout, ROWS)

    assert torch.allclose(replay.log_probs, rollout.log_probs.flatten(0, 1)[ROWS], atol=1e-4)
    folder = "random_pipeline_folder" if family == "GLM-Image" else "janus_folder"
    language = find_model(str(request.getfixturevalue(folder))).planner().language
    adapter = AdapterSection(rank=4, alpha=8.0, target_modules=("q_proj", "v_proj"))
    assert language.adapter_entries(adapter) == sum(weight.numel() for weight in trained.values())


def test_sample_gives_full_grids_inside_the_codebook(make_policy, batch):
    policy = make_policy()
    rollout = policy.sample(batch)

    assert rollout.token_ids.shape == (len(batch.prompts), 3, policy.tokens_per_image(batch))
    assert int(rollout.token_ids.min()) >= 0
    assert int(rollout.token_ids.max()) < policy.codebook_size
    assert rollout.sampling_mask is None
    assert not torch.equal(rollout.token_ids[:, 0], rollout.token_ids[:, 1])


def test_logits_that_are_not_finite_draw_no_token(make_policy, batch):
    policy = make_policy()
    with torch.no_grad():
        policy.model.model.language_model.norm.weight[3] = torch.nan

    with pytest.raises(NonFiniteError, match="rollout: .* token 0 of prompt .*, sample 0 is nan"):
        policy.sample(batch)


def test_float16_policy_learns_from_what_it_drew(load_policy, batch):
    gaps = {}
    for dtype in (torch.float16, torch.bfloat16):
        policy = load_policy(dtype)
        rollout = policy.sample(batch)
        log_probs = policy.replay(batch, rollout, ROWS).log_probs
        gap = log_probs.detach() - rollout.log_probs.flatten(0, 1)[ROWS]
        gaps[dtype] = float(gap.abs().mean())
        if dtype == torch.float16:
            assert policy.dtype == dtype
            (log_probs.mean() * 2**16).backward()
            for weight in policy.trainable_parameters():
                assert weight.dtype == weight.grad.dtype == torch.float32
                assert weight.grad.isfinite().all()
            # Second factors of adapters are 0, so first ones have no gradient yet.
            assert sum(bool(p.grad.any()) for p in policy.trainable_parameters()) >= 7
            reference = policy.reference_log_probs(batch, rollout, ROWS)
            assert reference.allclose(log_probs, atol=1e-5)
    # 11 bits instead of 8: an eighth, measured 0.1 to 0.2.
    assert 0 < gaps[torch.float16] < 0.4 * gaps[torch.bfloat16]


def test_numbers_outside_float16_are_explained(load_policy, batch):
    for dtype in (torch.bfloat16, torch.float16):
        policy = load_policy(dtype)
        with torch.no_grad():
            for layer in policy.network.language_model.layers:
                layer.post_attention_layernorm.weight.mul_(1e4)
        if dtype == torch.bfloat16:
            assert policy.sample(batch).log_probs.isfinite().all()
            continue
        with pytest.raises(NonFiniteError, match="65504.*model.dtype=bfloat16"):
            policy.sample(batch)


def test_image_outside_float16_is_explained(load_policy, batch):
    policy = load_policy(torch.float16)
    with torch.no_grad():
        for weight in policy.source_modules()[0].parameters():
            if weight.dim() == 4:
                weight.fill_(6e4)
    white = torch.full((1, 3, batch.height, batch.width), 255, dtype=torch.uint8)
    with pytest.raises(ModelError, match="65504.*model.dtype=bfloat16"):
        policy.tokenize_images(white)


def test_sample_is_a_function_of_the_seed(make_policy, batch):
    policy = make_policy()
    first = policy.sample(batch)
    again = policy.sample(batch)
    other = policy.sample(replace(batch, seed=12))

    assert torch.equal(first.token_ids, again.token_ids)
    assert torch.equal(first.log_probs, again.log_probs)
    assert not torch.equal(first.token_ids, other.token_ids)


def test_sample_of_a_prompt_does_not_depend_on_its_neighbours(make_policy, batch):
    policy = make_policy()
    together = policy.sample(batch)
    alone = replace(batch, prompts=batch.prompts[:1], decode_seeds=batch.decode_seeds[:1])

    single = policy.sample(alone)

    assert torch.equal(single.token_ids[0], together.token_ids[0])
    assert torch.allclose(single.log_probs[0], together.log_probs[0], atol=1e-4)


def test_truncated_tokens_lie_in_the_kept_set(make_policy, batch):
    rollout = make_policy(truncation=Truncation(top_k=7)).sample(batch)

    assert rollout.sampling_mask is not None
    assert (rollout.sampling_mask.sum(-1) == 7).all()
    assert rollout.sampling_mask.gather(-1, rollout.token_ids.unsqueeze(-1)).all()


def test_sample_returns_tensors_that_autograd_takes(make_policy, batch):
    rollout = make_policy(truncation=Truncation(top_k=3)).sample(batch)

    factor = torch.ones((), requires_grad=True)
    (rollout.log_probs * factor).sum().backward()

    assert factor.grad == rollout.log_probs.sum()
    assert not any(
        part.is_inference()
        for part in (rollout.token_ids, rollout.log_probs, rollout.sampling_mask)
    )


def test_prompts_read_one_at_a_time_are_those_read_at_once(make_policy, batch, monkeypatch):
    policy = make_policy()
    expected = policy.sample(batch)
    monkeypatch.setattr(sampling, "PREFILLED_AT_ONCE", 1)

    found = policy.sample(batch)

    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.allclose(found.log_probs, expected.log_probs, atol=1e-5)


def test_captured_step_draws_the_same_tokens(make_policy, batch, family, monkeypatch):
    policy = make_policy(adapter_rank=4)
    expected = policy.sample(batch)
    # Everything of a captured step but the graph.
    monkeypatch.setattr(token_step, "CapturedWork", lambda work: work)
    policy._build_step = CAPTURED[family]

    found = policy.sample(batch)

    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.allclose(found.log_probs, expected.log_probs, atol=1e-4)


def test_step_is_chosen_once(make_policy, batch, monkeypatch):
    policy = make_policy()
    policy.sample(batch)
    monkeypatch.setattr(type(policy), "_choose_step", None)
    policy.sample(batch)


def test_replay_entropy_is_that_of_the_sampling_distribution(make_policy, batch):
    policy = make_policy(truncation=Truncation(top_k=2))
    truncated = policy.sample(batch)

    entropy = policy.replay(batch, truncated, ROWS).entropy

    # Two entries are left: entropy is between 0 and ln 2.
    assert bool((entropy >= 0).all())
    assert float(entropy.max()) <= 0.6932


def test_checkpointed_gradient_equals_the_plain_one(make_policy, batch):
    policy = make_policy()
    rollout = policy.sample(batch)
    policy.replay(batch, rollout, ROWS).log_probs.mean().backward()
    plain = [p.grad.clone() for p in policy.trainable_parameters()]

    policy.model.zero_grad()
    policy = make_policy(is_checkpointing=True)
    policy.replay(batch, rollout, ROWS).log_probs.mean().backward()

    for parameter, gradient in zip(policy.trainable_parameters(), plain, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-6)


@pytest.mark.parametrize("adapter_rank", [None, 4])
def test_reference_stays_while_the_policy_moves(make_policy, batch, adapter_rank):
    policy = make_policy(adapter_rank=adapter_rank)
    rollout = policy.sample(batch)
    sampled = rollout.log_probs.flatten(0, 1)[ROWS]

    assert torch.allclose(policy.reference_log_probs(batch, rollout, ROWS), sampled, atol=1e-5)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(0.05)

    assert torch.allclose(policy.reference_log_probs(batch, rollout, ROWS), sampled, atol=1e-5)
    assert not torch.allclose(policy.replay(batch, rollout, ROWS).log_probs, sampled, atol=1e-2)


@pytest.mark.parametrize("adapter_rank", [None, 4])
def test_state_tensors_restore_the_policy(make_policy, batch, adapter_rank):
    policy = make_policy(adapter_rank=adapter_rank)
    rollout = policy.sample(batch)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(0.02)
    wanted = policy.replay(batch, rollout, ROWS).log_probs
    stored = {name: tensor.clone() for name, tensor in policy.state_tensors().items()}
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.zero_()

    policy.load_state_tensors(stored)

    assert torch.equal(policy.replay(batch, rollout, ROWS).log_probs, wanted)


def test_state_tensors_of_another_model_are_refused(make_policy):
    policy = make_policy(adapter_rank=4)
    tensors = policy.state_tensors()
    first, second, *_ = sorted(tensors)

    for changed, odd in (
        ({name: tensor for name, tensor in tensors.items() if name != first}, first),
        (tensors | {second: torch.zeros(1)}, second),
        (tensors | {"something": torch.zeros(1)}, "something"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(f" {odd})")):
            policy.load_state_tensors(changed)


def test_full_weights_are_copied_only_for_a_kl(random_pipeline):
    config = tiny_config("model.adapter=null", "loss.kl_coef=0.02")

    untrained = GlmImagePolicy(config.without_reference(), random_pipeline)
    assert untrained.reference.modules() == ()

    (copied,) = GlmImagePolicy(config, random_pipeline).reference.modules()
    assert copied.head.weight.equal(untrained.network.head.weight)
    assert copied.head.weight is not untrained.network.head.weight


@pytest.fixture(params=[None, 4], ids=["full", "adapters"])
def moved(request, make_policy, batch):
    """A policy that has moved, and what it drew before."""
    policy = make_policy(adapter_rank=request.param)
    rollout = policy.sample(batch)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in policy.trainable_parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    return policy, rollout


def of_policy(policy, batch, rollout):
    with torch.no_grad():
        return policy.replay(batch, rollout, FIRST).log_probs


def test_reference_becomes_the_policy_with_a_mix_of_1(moved, batch):
    policy, rollout = moved
    own = of_policy(policy, batch, rollout)
    before = policy.reference_log_probs(batch, rollout, FIRST)
    assert (before - own).abs().max() > 1e-3
    assert policy.reference.tensors() == {}

    policy.reference.mix(1.0)

    torch.testing.assert_close(policy.reference_log_probs(batch, rollout, FIRST), own)
    # The policy is what it was, to the bit, and the reference stays when it moves on.
    assert of_policy(policy, batch, rollout).equal(own)
    with torch.no_grad():
        for weight in policy.trainable_parameters():
            weight *= 1.1
    torch.testing.assert_close(policy.reference_log_probs(batch, rollout, FIRST), own)


def test_policy_is_its_reference_until_it_moves_and_where_the_reference_follows(moved):
    policy, _ = moved
    assert not policy.reference.equals_policy()
    policy.reference.mix(1.0)
    assert policy.reference.equals_policy()
    with torch.no_grad():
        policy.trainable_parameters()[-1].view(-1)[-1] += 1e-3
    assert not policy.reference.equals_policy()


def test_mix_is_that_of_the_weights(moved):
    policy, _ = moved
    policy.reference.mix(0.5)
    first = {name: value.clone() for name, value in policy.reference.tensors().items()}
    with torch.no_grad():
        for weight in policy.trainable_parameters():
            weight += 1.0
    policy.reference.mix(0.25)
    for name, value in policy.state_tensors().items():
        expected = 0.75 * first[name] + 0.25 * value
        torch.testing.assert_close(policy.reference.tensors()[name], expected)


def test_stored_reference_is_put_back(moved, batch):
    policy, rollout = moved
    policy.reference.mix(0.5)
    stored = {name: value.clone() for name, value in policy.reference.tensors().items()}
    expected = policy.reference_log_probs(batch, rollout, FIRST)
    policy.reference.mix(1.0)
    assert not policy.reference_log_probs(batch, rollout, FIRST).equal(expected)

    policy.reference.load_tensors(stored)

    assert policy.reference_log_probs(batch, rollout, FIRST).equal(expected)
