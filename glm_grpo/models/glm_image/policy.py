"""The AR policy: GLM-Image's language model and head, adapters, replay, reference.

Sampling and replay share one distribution: the head's logits cut to the codebook, divided by the
temperature, optionally truncated, normalised in fp32 (`support_log_probs`). The vision tower and
the VQ are always frozen; text-to-image training leaves them on the CPU.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from diffusers import GlmImagePipeline
from jaxtyping import Float32, Int64, UInt8
from peft import PeftModel
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from torch.nn.functional import interpolate

from glm_grpo.errors import CheckpointError
from glm_grpo.grpo.credit import TokenPlaces, token_places
from glm_grpo.grpo.update import Replay
from glm_grpo.models.base import Preview
from glm_grpo.models.glm_image.adapters import adapt
from glm_grpo.models.glm_image.fast.compiled_layers import CompiledLayers
from glm_grpo.models.glm_image.fast.stock_step import ChosenStep, StepBuilder
from glm_grpo.models.glm_image.network import PolicyNetwork, TokenSequences
from glm_grpo.models.glm_image.prompt_inputs import PromptInputs, encode_prompts, picture_tokens
from glm_grpo.models.glm_image.sampling import (
    UNTRUNCATED,
    Truncation,
    draw_tokens,
    sample_rollout,
)
from glm_grpo.models.glm_image.token_grid import (
    PIXELS_PER_TOKEN,
    batch_layout,
    generated_positions,
    token_layout,
)
from glm_grpo.types import Count, PromptBatch, Rollout, not_counted
from rewards.parts import Grid


class GlmImagePolicy:
    """GLM-Image's language model as a `Policy`, which documents the methods.

    Args:
        pipeline: Published parts; the language model is wrapped or copied, never the decoder.
        adapter_rank: Rank of LoRA adapters; None: train the language model and its head in full.
        adapter_alpha: Numerator of the adapter scale alpha / rank.
        is_checkpointing: Recompute activations in the backward pass.
        needs_reference: Keep a frozen copy for the KL if there are no adapters to switch off.
        has_entropy_gradient: Give replayed entropies a gradient, for a loss that weighs them.
        seed: Seed of the adapters' initial weights.
        is_compiling: Compile the decoder layers if they equal the eager ones; not for weights that
            an engine shards.
    """

    def __init__(
        self,
        pipeline: GlmImagePipeline,
        *,
        temperature: float,
        truncation: Truncation = UNTRUNCATED,
        adapter_rank: int | None,
        adapter_alpha: float,
        is_checkpointing: bool,
        needs_reference: bool,
        seed: int,
        has_entropy_gradient: bool = False,
        is_compiling: bool = False,
    ) -> None:
        self.model = pipeline.vision_language_encoder
        self.processor = pipeline.processor
        self.codebook_size: int = self.model.config.vq_config.num_embeddings
        self._truncation = truncation
        self.model.requires_grad_(False)
        self._adapted: PeftModel | None = None
        self._reference: PolicyNetwork | None = None
        self._reference_adapter: dict[str, Tensor] = {}
        self._is_reference_moved = False
        self._encoded: tuple[PromptBatch, PromptInputs] | None = None
        self.network = PolicyNetwork(
            self.model.model.language_model,
            self.model.lm_head,
            codebook_size=self.codebook_size,
            temperature=temperature,
        )
        self.network.has_entropy_gradient = has_entropy_gradient
        draw = partial(draw_tokens, self.network, truncation)
        self._build_step: StepBuilder = ChosenStep(draw, is_compiling=is_compiling)
        self._wrapped: nn.Module = self.network
        if adapter_rank is not None:
            self._adapted = adapt(self.model, rank=adapter_rank, alpha=adapter_alpha, seed=seed)
        else:
            if needs_reference:
                self._reference = copy.deepcopy(self.network)
                self._reference.requires_grad_(False)
            self.network.requires_grad_(True)
        if is_checkpointing:
            with warnings.catch_warnings():
                # The name that follows it does not exist in the oldest transformers supported.
                warnings.filterwarnings("ignore", "`gradient_checkpointing_enable` is deprecated")
                self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._compiled: CompiledLayers | None = None
        if is_compiling:
            networks = (self.network, *self.reference_modules())
            self._compiled = CompiledLayers(*(each.language_model for each in networks))

    @property
    def device(self) -> torch.device:
        """Present device of the language model."""
        return self.model.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the head, which is never quantised."""
        return self.model.lm_head.weight.dtype

    @property
    def temperature(self) -> float:
        """Temperature of sampling and replay, stored in the network."""
        return self.network.temperature

    @property
    def adapted_model(self) -> PeftModel | None:
        """The peft model around the language model; None if it is trained in full."""
        return self._adapted

    def modules(self) -> tuple[nn.Module, nn.Linear]:
        """Language model and head."""
        return (self.model.model.language_model, self.model.lm_head)

    def source_modules(self) -> tuple[nn.Module, nn.Module]:
        """Vision tower and VQ."""
        return (self.model.model.visual, self.model.model.vqmodel)

    def reference_modules(self) -> tuple[PolicyNetwork, ...]:
        """The frozen copy for the KL; empty with adapters or without KL."""
        return () if self._reference is None else (self._reference,)

    def wrap(self, wrapped: nn.Module) -> None:
        """See `Policy`."""
        self._wrapped = wrapped

    def run_network_once(self) -> None:
        """See `Policy`."""
        one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        sequences = TokenSequences(one, one + 1, one.expand(3, 1, 1), one, None)
        with torch.no_grad():
            self.network(*sequences)

    def trainable_parameters(self) -> Sequence[nn.Parameter]:
        """See `Policy`."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def encode(self, batch: PromptBatch) -> PromptInputs:
        """Encode the prompts of a batch, one row each; the last batch is cached.

        Raises:
            ValueError: Its source pictures have no tokens yet.
        """
        if batch.num_sources > 0 and batch.source_token_ids is None:
            raise ValueError("the source images have no tokens; call encode_sources first")
        if self._encoded is None or self._encoded[0] is not batch:
            inputs = encode_prompts(
                self.model,
                self.processor,
                [prompt.prompt for prompt in batch.prompts],
                height=batch.height,
                width=batch.width,
                source_token_ids=batch.source_token_ids,
            )
            self._encoded = (batch, inputs)
        return self._encoded[1]

    def encode_sources(self, batch: PromptBatch) -> PromptBatch:
        """See `Policy`."""
        if batch.num_sources == 0:
            return batch
        pictures = [source for prompt in batch.prompts for source in prompt.sources]
        ids = picture_tokens(self.model, self.processor, torch.stack(pictures))
        shape = (len(batch.prompts), batch.num_sources)
        return replace(batch, source_token_ids=ids.unflatten(0, shape))

    def tokens_per_image(self, batch: PromptBatch) -> int:
        """See `Policy`."""
        return batch_layout(batch).num_tokens

    def token_places(self, batch: PromptBatch) -> TokenPlaces:
        """See `Policy`; a place is a target token.

        A preview token draws several places, or part of one.
        """
        layout = batch_layout(batch)
        preview, target = Grid(*layout.preview), Grid(*layout.target)
        return token_places((preview, target), target)

    def sample(
        self,
        batch: PromptBatch,
        *,
        phase: str = "rollout",
        count: Count = not_counted,
    ) -> Rollout:
        """See `Policy`."""
        inputs = self.encode(batch)
        return sample_rollout(
            self.network,
            inputs,
            batch,
            truncation=self._truncation,
            phase=phase,
            build_step=self._build_step,
            count=count,
        )

    def tokenize_pictures(
        self,
        pixels: UInt8[Tensor, "N 3 H W"],
        *,
        num_sources: int = 0,
        preview: Preview = "zeros",
    ) -> Int64[Tensor, "N T"]:
        """See `Policy`. `encode` follows FlashAR (arXiv 2605.09430)."""
        target = picture_tokens(self.model, self.processor, pixels, is_any_size=True)
        layout = token_layout(*pixels.shape[-2:], has_preview=num_sources == 0)
        if layout.num_preview == 0:
            return target
        if preview == "encode":
            size = [PIXELS_PER_TOKEN * side for side in layout.preview]
            small = interpolate(pixels.float(), size, mode="bicubic", antialias=True)
            small = small.round().clamp(0, 255).to(torch.uint8)
            first = picture_tokens(self.model, self.processor, small, is_any_size=True)
        elif preview == "repeat":
            # Token ids are below 2^24, which float32 holds exactly.
            grid = target.unflatten(1, layout.target).unsqueeze(1).float()
            first = interpolate(grid, layout.preview, mode="nearest").flatten(1).long()
        else:
            first = target.new_zeros(len(pixels), layout.num_preview)
        return torch.cat([first, target], dim=1)

    def replay(self, prompts: PromptBatch, rollout: Rollout, rows: Int64[Tensor, " N"]) -> Replay:
        """See `PolicyForUpdate`."""
        language_model = self.model.model.language_model
        sequences = self._sequences(prompts, rollout, rows)
        # Only a module in training mode recomputes activations; there is no dropout to switch on.
        language_model.train(torch.is_grad_enabled())
        log_probs, entropy, outside_codebook = self._wrapped(*sequences)
        language_model.eval()
        return Replay(
            log_probs,
            entropy=entropy,
            outside_codebook=outside_codebook,
            num_preview=batch_layout(prompts).num_preview,
        )

    @torch.no_grad()
    def reference_log_probs(
        self, prompts: PromptBatch, rollout: Rollout, rows: Int64[Tensor, " N"]
    ) -> Float32[Tensor, "N T"]:
        """See `PolicyForUpdate`; with adapters switched off, or by the frozen copy.

        Raises:
            RuntimeError: The policy was built without a reference.
        """
        sequences = self._sequences(prompts, rollout, rows)
        if self._reference is not None:
            return self._reference.log_probs(sequences)
        if self._adapted is None:
            raise RuntimeError("the policy keeps no reference; build it with needs_reference=True")
        if not self._reference_adapter:
            with self._adapted.disable_adapter():
                return self.network.log_probs(sequences)
        own = {name: tensor.clone() for name, tensor in self.state_tensors().items()}
        set_peft_model_state_dict(self._adapted, self._reference_adapter)
        try:
            return self.network.log_probs(sequences)
        finally:
            set_peft_model_state_dict(self._adapted, own)

    @torch.no_grad()
    def is_reference(self) -> bool:
        """See `Policy`."""
        # Not state_dict(): FSDP2 would shard full parameters again.
        if self._reference is not None:
            own = dict(self.network.named_parameters())
            return all(
                torch.equal(tensor, own[name].to(tensor.device))
                for name, tensor in self._reference.named_parameters()
            )
        if self._adapted is None:
            return False
        adapters = {
            name.replace(f".{self._adapted.active_adapter}.", "."): tensor
            for name, tensor in self._adapted.named_parameters()
            if "lora_" in name
        }
        if self._reference_adapter:
            return all(
                torch.equal(tensor.cpu(), self._reference_adapter[name])
                for name, tensor in adapters.items()
            )
        return not any(tensor.any() for name, tensor in adapters.items() if "lora_B" in name)

    @torch.no_grad()
    def mix_reference(self, mix: float) -> None:
        """See `Policy`; adapters are mixed factor by factor.

        The first time, when the reference has no adapters yet, its change of the model becomes
        `mix` times the policy's.

        Raises:
            RuntimeError: The policy was built without a reference.
        """
        if self._reference is not None:
            own = self.network.state_dict()
            for name, tensor in self._reference.state_dict().items():
                tensor.lerp_(own[name].to(tensor.device), mix)
            self._is_reference_moved = True
            return
        if self._adapted is None:
            raise RuntimeError("the policy keeps no reference; build it with needs_reference=True")
        policy = self._adapter_copy()
        if not self._reference_adapter:
            self._reference_adapter = {
                name: tensor.zero_() if "lora_B" in name else tensor
                for name, tensor in self._adapter_copy().items()
            }
        for name, tensor in self._reference_adapter.items():
            tensor.lerp_(policy[name], mix)

    @torch.no_grad()
    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Policy`.

        Raises:
            CheckpointError: Names or shapes do not match this model.
        """
        self.load_state_tensors(tensors)
        if self._reference is not None:
            self._reference.load_state_dict(self.network.state_dict())
        elif self._adapted is not None:
            self._reference_adapter = self._adapter_copy()

    def reference_tensors(self) -> dict[str, Tensor]:
        """See `Policy`."""
        if self._reference is not None and self._is_reference_moved:
            return dict(self._reference.state_dict())
        return dict(self._reference_adapter)

    def load_reference_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Policy`."""
        if not tensors:
            return
        if self._reference is not None:
            self._reference.load_state_dict(tensors)
            self._is_reference_moved = True
        else:
            self._reference_adapter = {name: tensor.clone() for name, tensor in tensors.items()}

    def _adapter_copy(self) -> dict[str, Tensor]:
        return {name: tensor.cpu().clone() for name, tensor in self.state_tensors().items()}

    def state_tensors(self) -> dict[str, Tensor]:
        """The adapters, or the language model and its head."""
        if self._adapted is not None:
            # By default peft asks the hub, at each call, whether there are new words.
            return dict(get_peft_model_state_dict(self._adapted, save_embedding_layers=False))
        return dict(self.network.state_dict())

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Policy`."""
        expected = {name: tensor.shape for name, tensor in self.state_tensors().items()}
        found = {name: tensor.shape for name, tensor in tensors.items()}
        if expected != found:
            odd = sorted({name for name, _ in expected.items() ^ found.items()})[:3]
            raise CheckpointError(
                f"the checkpoint's weights do not fit the model (for example {', '.join(odd)}); "
                "resume with the model and adapter settings it was written with"
            )
        if self._adapted is not None:
            set_peft_model_state_dict(self._adapted, dict(tensors))
        else:
            self.network.load_state_dict(tensors)

    def _sequences(
        self, batch: PromptBatch, rollout: Rollout, rows: Int64[Tensor, " N"]
    ) -> TokenSequences:
        """Prompts and tokens of some rows, as inputs of the network."""
        inputs = self.encode(batch).rows(rows // batch.group_size)
        token_ids = rollout.token_ids.flatten(0, 1)[rows]
        layout = batch_layout(batch)
        later = generated_positions(layout, 0).unsqueeze(1) + inputs.next_position.view(1, -1, 1)
        attention_mask = None
        # Samples of one prompt have no padding.
        if not inputs.attention_mask.all():
            later_mask = inputs.attention_mask.new_ones(len(rows), layout.num_tokens - 1)
            attention_mask = torch.cat([inputs.attention_mask, later_mask], dim=1).to(self.device)
        sampling_mask = None
        if rollout.sampling_mask is not None:
            sampling_mask = rollout.sampling_mask.flatten(0, 1)[rows].to(self.device)
        sequences = TokenSequences(
            input_ids=torch.cat([inputs.input_ids, token_ids[:, :-1]], dim=1).to(self.device),
            attention_mask=attention_mask,
            position_ids=torch.cat([inputs.position_ids, later[..., :-1]], dim=2).to(self.device),
            token_ids=token_ids.to(self.device),
            sampling_mask=sampling_mask,
        )
        if self._compiled is not None:
            self._compiled.check(self.network, sequences)
        return sequences
