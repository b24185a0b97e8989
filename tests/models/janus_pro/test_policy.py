"""Tokens and log-probs of Janus-Pro are those of stock generation, with and without guidance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

from glm_grpo.errors import ModelError
from glm_grpo.models.janus_pro.prompt_inputs import encode_prompts, special_ids
from glm_grpo.models.sampling import Truncation
from glm_grpo.types import PromptBatch

ALL = torch.arange(9)


class Forcing(LogitsProcessor):
    """Records the raw scores of both rows, and lets `generate` choose given tokens."""

    def __init__(self, token_ids: Tensor) -> None:
        self._token_ids = token_ids
        self.scores: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        chosen = self._token_ids[:, len(self.scores)]
        self.scores.append(scores)
        only = torch.full_like(scores, -1e4)
        # Guidance, which follows, keeps the highest of rows that are alike.
        only[torch.arange(len(scores)), chosen.repeat(2)] = 1e4
        return only


def generate(policy: Any, batch: PromptBatch, **options: Any) -> Tensor:
    """What stock `generate` makes of the prompts, one image each."""
    messages = [
        [{"role": "user", "content": [{"type": "text", "text": prompt.prompt}]}]
        for prompt in batch.prompts
    ]
    inputs = policy.processor.apply_chat_template(
        messages,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        processor_kwargs={"generation_mode": "image", "padding": True, "return_tensors": "pt"},
    )
    return policy.model.generate(
        **inputs,
        generation_mode="image",
        past_key_values=DynamicCache(),
        **{"do_sample": False, "guidance_scale": 5.0} | options,
    )


def stock_scores(policy: Any, batch: PromptBatch, token_ids: Tensor) -> Tensor:
    """Raw scores of both rows at each token [2, P, T, V], from `generate` made to draw them."""
    forcing = Forcing(token_ids)
    generated = generate(policy, batch, logits_processor=LogitsProcessorList([forcing]))
    assert torch.equal(generated, token_ids)
    return torch.stack(forcing.scores, dim=1).unflatten(0, (2, -1))


def test_the_most_probable_tokens_are_those_of_stock_generation(make_janus_policy, janus_batch):
    policy = make_janus_policy(truncation=Truncation(top_k=1))
    rollout = policy.sample(janus_batch)
    assert torch.equal(generate(policy, janus_batch), rollout.token_ids[:, 0])


@pytest.mark.parametrize("scale", [5.0, 2.0, 1.0])
def test_log_probs_are_those_of_the_scores_that_stock_generation_makes(
    make_janus_policy, janus_batch, scale
):
    policy = make_janus_policy(guidance_scale=scale, temperature=0.8)
    rollout = policy.sample(janus_batch)
    token_ids = rollout.token_ids[:, 0]

    conditional, unconditional = stock_scores(policy, janus_batch, token_ids)

    guided = unconditional + scale * (conditional - unconditional)
    log_probs = (guided / 0.8).log_softmax(-1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(rollout.log_probs[:, 0], log_probs, atol=1e-4)
    replay = policy.replay(janus_batch, rollout, torch.tensor([0, 3, 6]))
    assert torch.allclose(replay.log_probs, log_probs, atol=1e-4)
    # At 1, where the second row is left out, they are those of the first row alone.
    assert (scale == 1.0) is torch.allclose(guided, conditional, atol=1e-6)


def test_guidance_changes_what_is_drawn(make_janus_policy, janus_batch):
    guided, plain = (make_janus_policy(guidance_scale=scale) for scale in (5.0, 1.0))
    rollout = guided.sample(janus_batch)
    log_probs = (each.replay(janus_batch, rollout, ALL).log_probs for each in (guided, plain))
    ours, unguided = log_probs
    assert (ours - unguided).abs().mean() > 0.5


@pytest.mark.parametrize("adapter_rank", [None, 4])
def test_the_gradient_flows_through_both_rows(make_janus_policy, janus_batch, adapter_rank):
    policy = make_janus_policy(adapter_rank=adapter_rank, temperature=0.9, entropy_coef=0.01)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    rollout = policy.sample(janus_batch)
    parameters = policy.trainable_parameters()
    replay = policy.replay(janus_batch, rollout, ALL)
    ours = torch.autograd.grad(replay.log_probs.mean() + replay.entropy.mean(), parameters)

    # Written down plainly: logits of both rows, from the embeddings of prompts and tokens.
    inner = policy.model.model
    inputs = policy.encode(janus_batch).rows(ALL // 3).with_unconditional(policy.ids)
    token_ids = rollout.token_ids.flatten(0, 1)
    drawn = policy.model.prepare_embeddings_for_image_generation(token_ids[:, :-1])
    states = torch.cat(
        [inner.language_model.embed_tokens(inputs.input_ids), torch.cat([drawn, drawn])], dim=1
    )
    mask = torch.cat([inputs.attention_mask, torch.ones(18, drawn.shape[1]).long()], dim=1)
    read = inner.language_model(inputs_embeds=states, attention_mask=mask).last_hidden_state
    logits = inner.generation_head(read[:, -token_ids.shape[1] :])
    conditional, unconditional = logits.chunk(2)
    every = ((unconditional + 5.0 * (conditional - unconditional)) / 0.9).log_softmax(-1)
    plain = every.gather(-1, token_ids.unsqueeze(-1)).mean()
    plain = plain - (every.exp() * every).sum(-1).mean()

    for own, wanted in zip(ours, torch.autograd.grad(plain, parameters), strict=True):
        assert torch.allclose(own, wanted, atol=1e-4 * float(wanted.abs().max() + 1))


def test_only_the_language_model_learns(make_janus_policy, janus_batch):
    policy = make_janus_policy(is_checkpointing=True)
    policy.replay(janus_batch, policy.sample(janus_batch), ALL).log_probs.mean().backward()
    for name, parameter in policy.model.named_parameters():
        is_trained = name.startswith("model.language_model.")
        assert parameter.requires_grad is is_trained, name
        assert (parameter.grad is not None and bool(parameter.grad.any())) is is_trained, name


def test_adapters_are_on_the_seven_matrices_of_every_layer(make_janus_policy):
    policy = make_janus_policy(adapter_rank=4)
    trained = [name for name, p in policy.model.named_parameters() if p.requires_grad]
    # 7 linear layers x 2 decoder layers x 2 factors; the vision tower has some of the same names.
    assert len(trained) == 28
    assert all("model.language_model.layers." in name and ".lora_" in name for name in trained)


def test_the_prompt_without_text_has_padding_in_its_place(make_janus_policy, janus_batch):
    policy = make_janus_policy()
    inputs = policy.encode(janus_batch)
    both = inputs.with_unconditional(policy.ids)
    empty = both.input_ids[3:]
    assert torch.equal(both.attention_mask[3:], inputs.attention_mask)
    assert (empty[:, -1] == policy.ids.image).all()
    first = inputs.attention_mask.argmax(dim=1)
    assert (empty.gather(1, first.unsqueeze(1)) == policy.ids.begin).all()
    # Nothing else is left of the text; padding on the left is no begin.
    assert ((empty != policy.ids.pad).sum(dim=1) == 2).all()


def test_prompts_without_their_first_token_are_refused(loaded_janus, monkeypatch):
    ids = special_ids(loaded_janus.model, loaded_janus.processor)
    processor = loaded_janus.processor
    monkeypatch.setattr(processor, "image_start_token", "")
    with pytest.raises(ModelError, match=f"{ids.begin} and {ids.image}"):
        encode_prompts(processor, ["a red cat"], ids)


def test_places_are_tokens(make_janus_policy, janus_batch):
    places = make_janus_policy().token_places(janus_batch)
    assert places.own.equal(torch.eye(16))
    assert places.to_go.equal(torch.ones(16, 16).triu())


def test_log_probs_of_the_row_with_the_prompt_alone_have_another_gradient(
    make_janus_policy, janus_batch
):
    # What others train on: sampled under guidance, scored without (docs/how_it_works.md).
    policy = make_janus_policy()
    rollout = policy.sample(janus_batch)
    advantages = torch.randn(9, 1, generator=torch.Generator().manual_seed(0))
    gradients = []
    for scale in (5.0, 1.0):
        policy.network.guidance_scale = scale
        log_probs = policy.replay(janus_batch, rollout, ALL).log_probs
        # The ratio is 1 by construction, whatever distribution the tokens came from.
        loss = (advantages * (log_probs - log_probs.detach()).exp()).mean()
        parts = torch.autograd.grad(loss, policy.trainable_parameters(), allow_unused=True)
        gradients.append(torch.cat([part.flatten() for part in parts if part is not None]))
    cosine = torch.nn.functional.cosine_similarity(*gradients, dim=0)
    assert cosine < 0.6
