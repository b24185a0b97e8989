"""One token at a time gives what the model's own forward pass over the whole row gives."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GlmImageTextModel
from transformers.cache_utils import DynamicCache
from transformers.models.glm_image.configuration_glm_image import GlmImageTextConfig

from glm_grpo.models.glm_image.fast import stock_step, token_step
from glm_grpo.models.glm_image.fast.captured_step import CapturedStep, FixedShapesStep
from glm_grpo.models.glm_image.fast.stock_step import StockStep, choose_step
from glm_grpo.models.glm_image.fast.token_step import GlmImagePrompts, TokenStep
from glm_grpo.models.glm_image.network import GlmImageNetwork
from glm_grpo.models.glm_image.prompt_inputs import PromptInputs
from glm_grpo.models.lora import AdaptedLinear

GROUP, TOKENS = 3, 5


def make_model(num_key_value_heads: int, partial_rotary_factor: float) -> GlmImageTextModel:
    sections = [2, 3, 3] if partial_rotary_factor == 1.0 else [1, 1, 2]
    config = GlmImageTextConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=num_key_value_heads,
        max_position_embeddings=64,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100.0,
            "mrope_section": sections,
            "partial_rotary_factor": partial_rotary_factor,
        },
        pad_token_id=0,
        eos_token_id=1,
        vision_vocab_size=40,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GlmImageTextModel(config).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                # Weights of 1 would hide a norm that leaves them out.
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def make_inputs(lengths: list[int]) -> PromptInputs:
    """Prompts of these lengths, padded on the left."""
    longest = max(lengths)
    mask = torch.tensor([[0] * (longest - length) + [1] * length for length in lengths])
    ids = torch.randint(2, 50, mask.shape, generator=torch.Generator().manual_seed(1))
    positions = (mask.cumsum(1) - 1).clamp(min=0).expand(3, -1, -1).contiguous()
    return PromptInputs(ids * mask, mask, positions, mask.sum(1))


# None: as on accelerators, room for all tokens at once, of which what is written is read.
@pytest.mark.parametrize(
    ("lengths", "num_key_value_heads", "partial_rotary_factor", "largest_growth"),
    [
        ([4, 4], 1, 0.5, 1),
        ([6, 3], 2, 1.0, 1),
        ([6, 3], 1, 1.0, 2),
        ([4, 4], 4, 0.5, 64),
        ([6, 3], 4, 0.5, None),
        ([4, 4], 2, 1.0, None),
    ],
)
@torch.no_grad()
def test_token_step_equals_the_forward_pass_over_whole_rows(
    lengths: list[int],
    num_key_value_heads: int,
    partial_rotary_factor: float,
    largest_growth: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_step, "_LARGEST_GROWTH", largest_growth or TOKENS)
    model, inputs = make_model(num_key_value_heads, partial_rotary_factor), make_inputs(lengths)
    generator = torch.Generator().manual_seed(2)
    token_ids = torch.randint(2, 50, (len(lengths) * GROUP, TOKENS), generator=generator)
    positions = later(inputs)
    step = TokenStep(network_of(model), prefilled(model, inputs), GROUP)
    if largest_growth is None:
        step._is_growing = False
    stepwise = torch.stack([step(token_ids[:, index]) for index in range(TOKENS)], dim=1)

    rows = torch.arange(len(lengths)).repeat_interleave(GROUP)
    whole = model(
        input_ids=torch.cat([inputs.input_ids[rows], token_ids], dim=1),
        attention_mask=torch.nn.functional.pad(inputs.attention_mask[rows], (0, TOKENS), value=1),
        position_ids=torch.cat([inputs.position_ids[:, rows], positions[:, rows]], dim=2),
        use_cache=False,
    ).last_hidden_state[:, -TOKENS:]
    torch.testing.assert_close(stepwise, whole, rtol=1e-5, atol=2e-5)


def adapt(model: GlmImageTextModel, config: LoraConfig) -> PeftModel:
    """Puts on adapters that change what the model gives."""
    config._register_custom_module({torch.nn.Linear: AdaptedLinear})
    adapted = get_peft_model(model, config).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return adapted


@pytest.mark.parametrize(("dtype", "use_dora"), [(torch.float32, True), (torch.bfloat16, False)])
@torch.no_grad()
def test_adapted_maps_give_what_their_modules_give(dtype: torch.dtype, use_dora: bool) -> None:
    names = ["q_proj", "k_proj", "v_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=6, target_modules=names, use_dora=use_dora)
    model = adapt(make_model(2, 1.0).to(dtype), config)
    layer = model.base_model.model.layers[0]
    attention = layer.self_attn
    modules = [attention.q_proj, attention.k_proj, attention.v_proj]
    states = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = torch.randn(3, 96, generator=torch.Generator().manual_seed(0)).to(dtype)

    fast = token_step._projections(layer, dtype)
    assert torch.equal(fast["down_proj"](wide), layer.mlp.down_proj(wide))
    assert torch.equal(fast["o_proj"](states), attention.o_proj(states))
    together = token_step._side_by_side(modules, dtype)(states)
    plain = [module.base_layer(states) for module in modules]
    for given, module, unadapted in zip(together, modules, plain, strict=True):
        assert torch.equal(given, module(states))
        assert not torch.equal(given, unadapted)
    with model.disable_adapter():
        for given, unadapted in zip(
            token_step._side_by_side(modules, dtype)(states), plain, strict=True
        ):
            assert torch.equal(given, unadapted)


def prefilled(model: GlmImageTextModel, inputs: PromptInputs) -> GlmImagePrompts:
    cache = DynamicCache()
    states = model(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        position_ids=inputs.position_ids,
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    return GlmImagePrompts(
        states[:, -1], len(states), TOKENS, cache, inputs.attention_mask.cpu(), later(inputs)
    )


def network_of(model: GlmImageTextModel) -> GlmImageNetwork:
    """With a head that no step reads."""
    return GlmImageNetwork(model, torch.nn.Linear(64, 50), codebook_size=50, temperature=1.0)


def later(inputs: PromptInputs) -> torch.Tensor:
    """Height and width go their own ways, as in a grid."""
    offsets = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 1, 1, 2], [0, 1, 0, 1, 0]])
    return offsets.unsqueeze(1) + inputs.next_position.view(1, -1, 1)


def weigh(hidden: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Stands for sampling."""
    return hidden * uniforms.unsqueeze(-1)


@torch.no_grad()
def test_stock_step_equals_the_fast_one() -> None:
    model, inputs = make_model(2, 0.5), make_inputs([6, 3])
    network, prompts = network_of(model), prefilled(model, inputs)
    fast, stock = (build(network, prompts, GROUP) for build in (TokenStep, StockStep))
    generator = torch.Generator().manual_seed(2)
    for _ in range(TOKENS):
        token_ids = torch.randint(2, 50, (2 * GROUP,), generator=generator)
        torch.testing.assert_close(stock(token_ids), fast(token_ids), rtol=1e-5, atol=2e-5)


@torch.no_grad()
def test_the_fast_step_is_chosen_where_it_equals_the_stock_one(caplog: Any) -> None:
    model, inputs = make_model(2, 0.5), make_inputs([6, 3, 4])
    prompts = prefilled(model, inputs)
    before = [layer.keys.clone() for layer in prompts.cache.layers]
    assert choose_step(network_of(model), prompts, weigh) is TokenStep
    assert caplog.text == ""
    for layer, keys in zip(prompts.cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)


@torch.no_grad()
def test_the_stock_step_is_used_where_the_fast_one_cannot_draw(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    model, inputs = make_model(2, 0.5), make_inputs([6, 3])
    build = choose_step(network_of(model), prefilled(model, inputs), fail)
    assert build is StockStep
    assert "stream is capturing" in caplog.text


def other_scale(model: GlmImageTextModel) -> None:
    """As a version might whose attention scales otherwise than its attribute says."""
    model.layers[1].post_mlp_layernorm.register_forward_hook(lambda _, __, found: 1.5 * found)


@torch.no_grad()
def test_the_stock_step_is_used_where_the_fast_one_gives_something_else(caplog: Any) -> None:
    model, inputs = make_model(2, 0.5), make_inputs([6, 3])
    other_scale(model)
    assert choose_step(network_of(model), prefilled(model, inputs), weigh) is StockStep
    assert re.search("hidden states differ", caplog.text)


@torch.no_grad()
def test_the_stock_step_is_used_where_the_fast_one_finds_other_parts(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AttributeError("no post_attention_layernorm")

    model, inputs = make_model(2, 0.5), make_inputs([6, 3])
    monkeypatch.setattr(stock_step, "TokenStep", fail)
    assert choose_step(network_of(model), prefilled(model, inputs), weigh) is StockStep
    assert re.search("AttributeError: .*layernorm", caplog.text)


@torch.no_grad()
def test_memory_that_runs_out_is_no_reason_for_the_stock_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model, inputs = make_model(2, 0.5), make_inputs([4, 4])
    monkeypatch.setattr(stock_step, "TokenStep", fail)
    with pytest.raises(torch.OutOfMemoryError):
        choose_step(network_of(model), prefilled(model, inputs), weigh)


@torch.no_grad()
def test_step_of_fixed_shapes_equals_the_fast_one() -> None:
    model, inputs = make_model(2, 0.5), make_inputs([6, 3])
    network, prompts = network_of(model), prefilled(model, inputs)
    fixed, fast = (build(network, prompts, GROUP) for build in (FixedShapesStep, TokenStep))
    generator = torch.Generator().manual_seed(2)
    for _ in range(TOKENS):
        token_ids = torch.randint(2, 50, (2 * GROUP,), generator=generator)
        torch.testing.assert_close(fixed(token_ids), fast(token_ids), rtol=1e-5, atol=2e-5)


EVERY_MAP = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Sets what `torch.compile` hands its graphs to."""
    torch_compile = torch.compile

    def with_backend(backend: Any) -> None:
        monkeypatch.setattr(
            torch, "compile", lambda function, **_: torch_compile(function, backend=backend)
        )

    token_step._compiled.cache_clear()
    # Checks of types would break graphs.
    jaxtyping.config.update("jaxtyping_disable", True)
    yield with_backend
    jaxtyping.config.update("jaxtyping_disable", False)
    token_step._compiled.cache_clear()
    torch.compiler.reset()


@torch.inference_mode()
def assert_compiled_step_equals_the_fast_one(dtype: torch.dtype) -> None:
    model, inputs = make_model(2, 0.5).to(dtype), make_inputs([6, 3])
    adapt(model, LoraConfig(r=4, target_modules=EVERY_MAP))
    network, prompts = network_of(model), prefilled(model, inputs)
    compiled = FixedShapesStep(network, prompts, GROUP, is_compiled=True)
    fast = TokenStep(network, prompts, GROUP)
    generator = torch.Generator().manual_seed(2)
    for _ in range(TOKENS):
        token_ids = torch.randint(2, 50, (2 * GROUP,), generator=generator)
        torch.testing.assert_close(compiled(token_ids), fast(token_ids), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_step_is_two_graphs_for_all_rollouts(dtype: torch.dtype, compiling: Any) -> None:
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiling(backend)
    assert_compiled_step_equals_the_fast_one(dtype)
    # Another model of this form, whose layers and tensors are others.
    assert_compiled_step_equals_the_fast_one(dtype)
    assert len(graphs) == 2


@pytest.mark.long
@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_compiled_by_inductor_rounds_like_the_fast_one(dtype: torch.dtype) -> None:
    assert_compiled_step_equals_the_fast_one(dtype)


def on_the_accelerator(inputs: PromptInputs) -> PromptInputs:
    """Ids, mask and positions there, where the next positions stay."""
    return PromptInputs(
        inputs.input_ids.cuda(),
        inputs.attention_mask.cuda(),
        inputs.position_ids.cuda(),
        inputs.next_position,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("is_compiling", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_adapted", [False, True])
@torch.inference_mode()
def test_captured_step_is_chosen_on_an_accelerator_and_equals_the_fast_one(
    is_adapted: bool, dtype: torch.dtype, is_compiling: bool, caplog: Any
) -> None:
    model, inputs = make_model(2, 0.5).to("cuda", dtype), make_inputs([6, 3])
    if is_adapted:
        adapt(model, LoraConfig(r=4, target_modules=EVERY_MAP))
    network, prompts = network_of(model), prefilled(model, on_the_accelerator(inputs))
    build = choose_step(network, prompts, weigh, is_compiling=is_compiling)
    assert caplog.text == ""
    captured, fast = (each(network, prompts, GROUP) for each in (build, TokenStep))
    assert isinstance(captured, CapturedStep)
    read = captured.then(lambda hidden, uniforms: (hidden * uniforms.unsqueeze(-1), None))
    generator = torch.Generator().manual_seed(2)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for _ in range(TOKENS):
        token_ids = torch.randint(2, 50, (2 * GROUP,), generator=generator).cuda()
        uniforms = torch.rand(2 * GROUP, generator=generator, dtype=torch.float64).cuda()
        hidden, nothing = read(token_ids, uniforms)
        assert nothing is None
        expected = fast(token_ids) * uniforms.unsqueeze(-1)
        torch.testing.assert_close(hidden, expected, rtol=tolerance, atol=2 * tolerance)
