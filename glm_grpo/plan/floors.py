"""Floors: the least time a phase can take on a device, from bytes moved and operations done.

A floor is what a device's published peak figures allow with nothing lost. It is no prediction: real
runs take longer, and what is left out here (norms, softmax, adapters, optimizer, launches of
kernels, reward networks) only adds to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from glm_grpo.config import Config
from glm_grpo.models.planning import LanguageWork, MemoryPlan, Planner
from glm_grpo.plan.devices import DeviceSpeed
from glm_grpo.plan.fit import batch_sizes, model_settings


@dataclass(frozen=True)
class SequenceSizes:
    """What one step samples and replays.

    Attributes:
        prompts: P.
        group_size: G.
        tokens: T, generated.
    """

    prompts: int
    group_size: int
    prompt_tokens: int
    tokens: int

    @property
    def images(self) -> int:
        """P * G."""
        return self.prompts * self.group_size


def step_floors(
    config: Config,
    planner: Planner,
    *,
    prompt_tokens: int,
    plan: MemoryPlan,
    device: DeviceSpeed,
    processes: int = 1,
) -> dict[str, float]:
    """Seconds by phase; reward terms have no floor, since what they do is their own.

    Args:
        prompt_tokens: Of the longest prompt; all are taken to be as long.
        plan: Of the same config: says what offloading moves.
        device: Where it runs.
        processes: That share the prompts, each on such a device; what they send each other is not
            counted.
    """
    sizes = batch_sizes(config, prompt_tokens=prompt_tokens, processes=processes)
    language = planner.language_work(model_settings(config, is_on_accelerator=True))
    read, generated = planner.sequence_tokens(sizes)
    sequences = SequenceSizes(
        prompts=sizes.prompts, group_size=sizes.group_size, prompt_tokens=read, tokens=generated
    )
    decoding = decode_flops(
        *planner.decoder_flops(sizes.height, sizes.width),
        images=sizes.images,
        steps=config.decode.rollout_steps or config.decode.steps,
        guidance_scale=config.decode.guidance_scale,
    )
    learning = update_flops(
        language,
        sequences,
        updates=config.train.updates_per_rollout,
        is_full=config.model.adapter is None,
        is_checkpointing=config.model.gradient_checkpointing,
        needs_reference=config.needs_reference,
    )
    seconds = {
        "rollout": rollout_floor(language, sequences, device),
        "decode": decoding / device.flops,
        "update": learning / device.flops,
    }
    if config.train.method == "sft":
        seconds = {"update": seconds["update"]}
    if plan.moved_in:
        seconds["offload"] = (plan.moved_in + plan.moved_out) / device.link
    return seconds


def rollout_floor(work: LanguageWork, sizes: SequenceSizes, device: DeviceSpeed) -> float:
    """Seconds to read the prompts and draw all tokens; the slower of memory and operations at each.

    A prompt's keys and values are read once for its group.
    """
    seconds = max(
        work.read_bytes / device.bandwidth,
        sizes.prompts * _forward_flops(work, sizes.prompt_tokens, scored=1) / device.flops,
    )
    # The last token is drawn, and nothing follows from it.
    for generated in range(1, sizes.tokens):
        cached = sizes.prompts * sizes.prompt_tokens + sizes.images * generated
        attention = _attention_flops(work, sizes.prompt_tokens + generated)
        flops = sizes.images * (2 * (work.layer_entries + work.head_entries) + attention)
        seconds += max(
            (work.read_bytes + cached * work.cache_bytes) / device.bandwidth,
            flops / device.flops,
        )
    return seconds


def update_flops(
    work: LanguageWork,
    sizes: SequenceSizes,
    *,
    updates: int,
    is_full: bool,
    is_checkpointing: bool,
    needs_reference: bool,
) -> int:
    """Operations of replay, backward pass and reference, over all images of a step.

    A matrix costs 2 operations an entry and token, once forward, once for the gradient of its
    input, once for its own, and once more where the forward pass is repeated: layers under
    checkpointing. Logits beyond a chunk, which a trained head makes again, come on top. Attention
    costs twice as much backward as forward.

    Args:
        updates: Of the optimizer on one rollout.
        is_full: Gradients of all matrices; False: they flow through to adapters alone.
        is_checkpointing: Layers are computed again in the backward pass.
        needs_reference: A KL to the reference is weighted.
    """
    length = sizes.prompt_tokens + sizes.tokens - 1
    layers = 2 * work.layer_entries * length
    head = 2 * work.head_entries * sizes.tokens
    attention = _attention_flops(work, _causal_pairs(length))
    again = int(is_checkpointing)
    an_update = (2 + is_full + again) * layers + (2 + is_full) * head + (3 + again) * attention
    reference = layers + head + attention if needs_reference else 0
    return sizes.images * (updates * an_update + reference)


def decode_flops(
    transformer_flops: int, vae_flops: int, *, images: int, steps: int, guidance_scale: float
) -> int:
    """Operations of drawing images.

    Args:
        transformer_flops: Of one pass of the diffusion transformer, for one image.
        vae_flops: Of turning the latents of one image into pixels.
        images: How many.
        guidance_scale: Above 1 a step costs two passes.
    """
    passes = 2 if guidance_scale > 1 else 1
    return images * (steps * passes * transformer_flops + vae_flops)


def _forward_flops(work: LanguageWork, length: int, *, scored: int) -> int:
    matrices = 2 * (work.layer_entries * length + work.head_entries * scored)
    return matrices + _attention_flops(work, _causal_pairs(length))


def _attention_flops(work: LanguageWork, pairs: int) -> int:
    """A query meets a key, and a weight a value: 2 operations an entry each."""
    return 4 * work.attention_width * pairs


def _causal_pairs(length: int) -> int:
    """Pairs of a token with itself or one before it."""
    return length * (length + 1) // 2
