"""The AR policy: GLM-Image's language model and head, adapters, replay, reference.

Sampling and replay share one distribution: the head's logits cut to the codebook, divided by the
temperature, optionally truncated, normalised in fp32 (`support_log_probs`). The vision tower and
the VQ are frozen always and never leave the CPU: text-to-image training does not need them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from diffusers import GlmImagePipeline
from jaxtyping import Bool, Float, Float32, Int64
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn

from glm_grpo.errors import CheckpointError
from glm_grpo.glm_image.prompt_inputs import PromptInputs, encode_prompts
from glm_grpo.glm_image.token_grid import generated_positions, token_layout
from glm_grpo.glm_image.token_scores import TokenScores, score_tokens
from glm_grpo.grpo.update import Replay
from glm_grpo.types import Experience, PromptBatch

ADAPTED_MODULES = (
    r"model\.language_model\.layers\.\d+\."
    r"(self_attn\.(q|k|v|o)_proj|mlp\.(gate_up|down)_proj)"
)
"""Linear layers that adapters go on, by path: the vision tower has modules of similar names."""


class Policy:
    """A language model that samples token grids and is trained.

    Args:
        pipeline: Published parts; the language model is wrapped or copied, never the decoder.
        temperature: Of sampling and replay, > 0.
        adapter_rank: Rank of LoRA adapters; None trains language model and head in full.
        adapter_alpha: Scale numerator of the adapters.
        is_checkpointing: Recompute activations in the backward pass.
        needs_reference: Keep a frozen copy for the KL when there are no adapters to switch off.
        seed: Of the adapters' initial weights.
    """

    def __init__(
        self,
        pipeline: GlmImagePipeline,
        *,
        temperature: float,
        adapter_rank: int | None,
        adapter_alpha: float,
        is_checkpointing: bool,
        needs_reference: bool,
        seed: int,
    ) -> None:
        self.model = pipeline.vision_language_encoder
        self.processor = pipeline.processor
        self.temperature = temperature
        self.codebook_size: int = self.model.config.vq_config.num_embeddings
        self.model.requires_grad_(False)
        self._adapted: PeftModel | None = None
        self._reference: tuple[nn.Module, nn.Linear] | None = None
        self._encoded: tuple[PromptBatch, PromptInputs] | None = None
        if adapter_rank is not None:
            self._adapted = _adapt(self.model, rank=adapter_rank, alpha=adapter_alpha, seed=seed)
        else:
            if needs_reference:
                self._reference = copy.deepcopy(self.modules())
                for module in self._reference:
                    module.requires_grad_(False)
            self._trained_modules().requires_grad_(True)
        if is_checkpointing:
            with warnings.catch_warnings():
                # The name that follows it does not exist in the oldest transformers supported.
                warnings.filterwarnings("ignore", "`gradient_checkpointing_enable` is deprecated")
                self.model.gradient_checkpointing_enable({"use_reentrant": False})

    @property
    def device(self) -> torch.device:
        """Where the language model is now."""
        return self.model.lm_head.weight.device

    @property
    def adapted_model(self) -> PeftModel | None:
        """The peft model around the language model; None when it is trained in full."""
        return self._adapted

    def modules(self) -> tuple[nn.Module, nn.Linear]:
        """Language model and head: what rollout and update need on the accelerator."""
        return (self.model.model.language_model, self.model.lm_head)

    def reference_modules(self) -> tuple[nn.Module, ...]:
        """The frozen copy the KL needs; empty with adapters or without KL."""
        return () if self._reference is None else self._reference

    def trainable_parameters(self) -> Sequence[nn.Parameter]:
        """The parameters the optimizer moves."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def encode(self, batch: PromptBatch) -> PromptInputs:
        """Encodes the prompts of a batch, a row each; remembers the last batch."""
        if self._encoded is None or self._encoded[0] is not batch:
            prompts = [prompt.prompt for prompt in batch.prompts]
            inputs = encode_prompts(
                self.model, self.processor, prompts, height=batch.height, width=batch.width
            )
            self._encoded = (batch, inputs)
        return self._encoded[1]

    def codebook_logits(self, hidden_states: Float[Tensor, "N D"]) -> Float32[Tensor, "N V"]:
        """Logits over the codebook alone, in fp32, divided by the temperature."""
        weight = self.model.lm_head.weight[: self.codebook_size]
        return nn.functional.linear(hidden_states, weight).float() / self.temperature

    def replay(self, experience: Experience, rows: Int64[Tensor, " N"]) -> Replay:
        """Scores sampled tokens under the present policy, with gradient.

        Args:
            experience: Prompts and tokens.
            rows: Into the flattened P * G axis.
        """
        language_model = self.model.model.language_model
        # Only a module in training mode recomputes activations; there is no dropout to switch on.
        language_model.train()
        scores = self._score(experience, rows, language_model, self.model.lm_head)
        language_model.eval()
        return Replay(log_probs=scores.log_probs, entropy=scores.entropy)

    @torch.no_grad()
    def reference_log_probs(
        self, experience: Experience, rows: Int64[Tensor, " N"]
    ) -> Float32[Tensor, "N T"]:
        """Scores sampled tokens under the policy before training: adapters off, or the copy.

        Raises:
            RuntimeError: The policy was built without a reference.
        """
        if self._reference is not None:
            model, head = self._reference
            without_adapters: AbstractContextManager[None] = nullcontext()
        elif self._adapted is not None:
            model, head = self.modules()
            without_adapters = self._adapted.disable_adapter()
        else:
            raise RuntimeError("the policy keeps no reference; build it with needs_reference=True")
        with without_adapters:
            return self._score(experience, rows, model, head).log_probs

    def state_tensors(self) -> dict[str, Tensor]:
        """What training changes: the adapters, or the language model and head."""
        if self._adapted is not None:
            return dict(get_peft_model_state_dict(self._adapted))
        return dict(self._trained_modules().state_dict())

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores what `state_tensors` returned.

        Raises:
            CheckpointError: Names do not fit this model.
        """
        expected = set(self.state_tensors())
        if expected != set(tensors):
            odd = sorted(expected.symmetric_difference(tensors))[:3]
            raise CheckpointError(
                f"the checkpoint's weights do not fit the model (for example {', '.join(odd)}); "
                "resume with the model and adapter settings it was written with"
            )
        if self._adapted is not None:
            set_peft_model_state_dict(self._adapted, dict(tensors))
        else:
            self._trained_modules().load_state_dict(tensors)

    def _trained_modules(self) -> nn.ModuleDict:
        language_model, head = self.modules()
        return nn.ModuleDict({"language_model": language_model, "lm_head": head})

    def _score(
        self,
        experience: Experience,
        rows: Int64[Tensor, " N"],
        language_model: nn.Module,
        head: nn.Linear,
    ) -> TokenScores:
        """One forward pass over prompt and tokens; scores only what was generated."""
        batch, rollout = experience.prompts, experience.rollout
        inputs = self.encode(batch).rows(rows // batch.group_size)
        token_ids = rollout.token_ids.flatten(0, 1)[rows]
        layout = token_layout(batch.height, batch.width)
        later = generated_positions(layout, 0).unsqueeze(1) + inputs.next_position.view(1, -1, 1)
        mask = inputs.attention_mask
        num_inputs = layout.num_tokens - 1
        hidden_states = language_model(
            input_ids=torch.cat([inputs.input_ids, token_ids[:, :-1]], dim=1).to(self.device),
            attention_mask=torch.cat([mask, mask.new_ones(len(rows), num_inputs)], dim=1).to(
                self.device
            ),
            position_ids=torch.cat([inputs.position_ids, later[..., :-1]], dim=2).to(self.device),
            use_cache=False,
        ).last_hidden_state
        is_kept = None
        if rollout.is_kept is not None:
            is_kept = rollout.is_kept.flatten(0, 1)[rows].to(self.device)
        return score_tokens(
            hidden_states[:, -layout.num_tokens :],
            head.weight[: self.codebook_size],
            token_ids.to(self.device),
            temperature=self.temperature,
            is_kept=is_kept,
        )


def support_log_probs(
    logits: Float32[Tensor, "*N V"], is_kept: Bool[Tensor, "*N V"] | None
) -> Float32[Tensor, "*N V"]:
    """Normalised log-probabilities over the kept entries; -inf on the others."""
    if is_kept is not None:
        logits = logits.masked_fill(~is_kept, -torch.inf)
    return logits.log_softmax(dim=-1)


def _adapt(model: nn.Module, *, rank: int, alpha: float, seed: int) -> PeftModel:
    """Puts LoRA on the language model; the adapters start as no change at all."""
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=ADAPTED_MODULES)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapted = get_peft_model(model, config)
    return adapted.eval()
