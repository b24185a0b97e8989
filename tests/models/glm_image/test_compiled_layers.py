"""Compiled layers score what eager ones score, or are not used."""

from __future__ import annotations

import copy
import logging
import re

import jaxtyping
import pytest
import torch
from transformers.models.glm_image.modeling_glm_image import GlmImageTextDecoderLayer

from glm_grpo.models.find import find_model
from glm_grpo.models.glm_image.loading import load_pipeline

TORCH_COMPILE = torch.compile
ROWS = torch.tensor([0, 2])
"""Of the shorter prompt."""


@pytest.fixture(autouse=True)
def _as_in_a_run(small_preview):
    """Without checks of types, which break graphs; nothing is left compiled."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
    torch.compiler.reset()


def warnings_of(caplog):
    """Of this package: tests look at types in compiled functions too, which torch remarks on."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.startswith("glm_grpo")
    ]


@pytest.fixture
def build(loaded_pipeline, build_policy, monkeypatch):
    """Builds a policy with adapters that change what it gives, compiled by some backend."""

    def build(backend=None, pipeline=loaded_pipeline, **changes):
        if backend != "inductor":
            monkeypatch.setattr(
                torch,
                "compile",
                lambda function, **_: TORCH_COMPILE(function, backend=backend, dynamic=True),
            )
        policy = build_policy(
            copy.deepcopy(pipeline),
            **{"adapter_rank": 4, "is_compiling": backend is not None} | changes,
        )
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in policy.trainable_parameters():
                if changes.get("adapter_rank", 4) is not None:
                    weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
        return policy

    return build


def counting(graphs):
    def backend(graph, _):
        graphs.append(graph)
        return graph

    return backend


def layers_of(policy):
    return policy.model.model.language_model.layers


@pytest.mark.parametrize("adapter_rank", [4, pytest.param(None, marks=pytest.mark.long)])
@torch._dynamo.config.patch(recompile_limit=2)
def test_compiled_layers_score_what_eager_ones_do(build, batch, adapter_rank, caplog):
    eager = build(adapter_rank=adapter_rank)
    rollout = eager.sample(batch)
    graphs = []
    policy = build(counting(graphs), adapter_rank=adapter_rank, is_checkpointing=True)

    # Each prompt alone has no mask, both have one; lengths differ.
    for rows in (ROWS, ROWS + 3, torch.tensor([1, 4, 5])):
        ours, theirs = (each.replay(batch, rollout, rows).log_probs for each in (policy, eager))
        assert torch.allclose(ours, theirs, atol=1e-5)
        for own, other in zip(
            torch.autograd.grad(ours.mean(), policy.trainable_parameters()),
            torch.autograd.grad(theirs.mean(), eager.trainable_parameters()),
            strict=True,
        ):
            assert torch.allclose(own, other, atol=1e-5)
        ours, theirs = (each.reference_log_probs(batch, rollout, rows) for each in (policy, eager))
        assert torch.allclose(ours, theirs, atol=1e-5)
    # Checkpointed inside of them.
    targets = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert any("checkpoint" in target for target in targets)
    # All layers, rows and lengths share graphs: with and without gradient, adapters and mask.
    assert 2 < len(graphs) <= 8
    made = len(graphs)
    assert torch.equal(policy.sample(batch).token_ids, rollout.token_ids)
    assert len(graphs) == made
    assert policy.state_tensors().keys() == eager.state_tensors().keys()
    assert warnings_of(caplog) == []


def failing(graph, _):
    raise FileNotFoundError("no compiler")


def wrong(graph, _):
    return lambda *inputs: tuple(1.5 * each for each in graph(*inputs))


@pytest.mark.parametrize(
    ("backend", "reason"),
    [(failing, "no compiler"), (wrong, "log-probs differ by .* nats per token")],
    ids=["no compiler", "other figures"],
)
def test_layers_stay_eager_where_compiling_fails(build, batch, backend, reason, caplog):
    eager = build(is_checkpointing=True)
    rollout = eager.sample(batch)
    policy = build(backend, is_checkpointing=True)

    for _ in range(2):
        ours, theirs = (each.replay(batch, rollout, ROWS).log_probs for each in (policy, eager))
        assert torch.equal(ours, theirs)
    (warning,) = warnings_of(caplog)
    assert re.search(reason, warning)
    assert {type(layer) for layer in layers_of(policy)} == {GlmImageTextDecoderLayer}
    assert all(layer.gradient_checkpointing for layer in layers_of(policy))


def test_layers_stay_eager_where_their_cache_has_another_name(build, batch, caplog):
    policy = build("eager")
    rollout = policy.sample(batch)

    # As transformers from 5.24 on.
    def rename(layer, args, kwargs):
        cache = kwargs.pop("past_key_values")
        return args, kwargs | {"cache": cache}

    for layer in layers_of(policy):
        layer.register_forward_pre_hook(rename, with_kwargs=True)
    policy.replay(batch, rollout, ROWS)
    assert {type(layer) for layer in layers_of(policy)} == {GlmImageTextDecoderLayer}
    (warning,) = warnings_of(caplog)
    assert "past_key_values" in warning


def kept_bytes(policy, batch, rollout):
    """Of what a backward pass needs, weights aside."""
    sizes = {}

    def pack(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        policy.replay(batch, rollout, ROWS)
    return sum(sizes.values())


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.long), pytest.param("cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_compiled_by_inductor_round_like_eager_ones(build, batch, dtype, device, caplog):
    pipeline = load_pipeline(find_model("tiny").path, dtype=dtype)
    eager = build(pipeline=pipeline)
    policy = build("inductor", pipeline=pipeline, is_checkpointing=True)
    for each in (eager, policy):
        for module in each.modules():
            module.to(device)
    rollout = eager.sample(batch)
    ours, theirs = (each.replay(batch, rollout, ROWS).log_probs for each in (policy, eager))

    # Sampled and replayed differ by as much in bf16.
    assert (ours - theirs).abs().mean() < (1e-5 if dtype == torch.float32 else 1e-2)
    own, other = (
        torch.cat(
            [
                each.flatten()
                for each in torch.autograd.grad(log_probs.mean(), by.trainable_parameters())
            ]
        )
        for log_probs, by in ((ours, policy), (theirs, eager))
    )
    assert torch.cosine_similarity(own, other, dim=0) > 0.99
    assert kept_bytes(policy, batch, rollout) < kept_bytes(eager, batch, rollout) / 4
    assert warnings_of(caplog) == []
