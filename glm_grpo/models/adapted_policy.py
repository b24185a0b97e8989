"""What every family's policy shares: sampling, replay, weights and their state."""

from __future__ import annotations

import copy
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64, UInt8
from peft import PeftModel
from peft.utils import set_peft_model_state_dict
from torch import Tensor, nn
from typing_extensions import override

from glm_grpo.config import Config
from glm_grpo.errors import CheckpointError
from glm_grpo.grpo.credit import TokenPlaces
from glm_grpo.grpo.policy import PolicyForUpdate, Replay
from glm_grpo.models.base import Preview
from glm_grpo.models.four_bits import dequantize
from glm_grpo.models.lora import adapt, adapter_tensors, held_factors
from glm_grpo.models.network import PolicyNetwork
from glm_grpo.models.reference import FrozenCopy, OtherAdapters, Reference
from glm_grpo.models.sampling import (
    SampledTokens,
    Truncation,
    join_tokens,
    sample_grids,
    sample_tokens,
)
from glm_grpo.models.token_step import ReadPrompts, StepBuilder
from glm_grpo.seeds import derive_seed
from glm_grpo.types import ProgressCallback, PromptBatch, Rollout, no_progress

_ADAPTER_STD = 0.02
"""Of second factors that are drawn to check adapters, which are 0 in new ones."""


class _Float32Embedding(nn.Module):
    """Embeddings cast to float32, without a copy of the table.

    Args:
        table: Stays in its dtype, because it is no submodule.
    """

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self._table = (table,)

    def forward(self, token_ids: Int64[Tensor, "*N"]) -> Float32[Tensor, "*N D"]:
        embedded: Tensor = self._table[0](token_ids)
        return embedded.float()


class AdaptedPolicy(PolicyForUpdate):
    """An AR model that samples token grids and replays them; trained by adapters, or in full.

    `replay` and `reference_log_probs` score tokens under the distribution that `sample` draws from,
    including temperature and truncation.

    Attributes:
        codebook_size: Token ids are in [0, codebook_size).
        network: The trained module, for DDP or FSDP2 to wrap.
        reference: The policy that a KL refers to. A network trained in full has one only if the
            config needs it.

    Args:
        model: Stock model that contains the network; frozen, and adapted in place.
        network: Its parameters are those of `model`.
        trained: What is trained without adapters: `network`, or a part of it.
        adapted_modules: Names of the layers that can be adapted, see `adapt`.
    """

    codebook_size: int
    network: PolicyNetwork[Any]

    def __init__(
        self,
        config: Config,
        model: Any,
        network: PolicyNetwork[Any],
        *,
        trained: nn.Module,
        adapted_modules: Sequence[str],
    ) -> None:
        network.has_entropy_gradient = config.loss.entropy_coef != 0
        self.model = model
        self.network = network
        self._truncation = Truncation.of(config.rollout)
        self._encoded: tuple[PromptBatch, Any] | None = None
        self._build_step: StepBuilder | None = None
        self._adapted: PeftModel | None = None
        self.reference = Reference()
        self._wrapped: nn.Module = network
        model.requires_grad_(False)
        if config.model.adapter is not None:
            seed = derive_seed(config.train.seed, "adapter")
            self._adapted = adapt(model, adapted_modules, config.model.adapter, seed=seed)
            self.reference = OtherAdapters(network, self._adapted)
        else:
            if config.needs_reference:
                self.reference = FrozenCopy(network)
            trained.requires_grad_(True)
        if config.model.gradient_checkpointing:
            with warnings.catch_warnings():
                # The name that follows it does not exist in the oldest transformers supported.
                warnings.filterwarnings("ignore", "`gradient_checkpointing_enable` is deprecated")
                model.gradient_checkpointing_enable({"use_reentrant": False})

    @property
    def adapted_model(self) -> PeftModel | None:
        """The peft model around the stock one; None without adapters."""
        return self._adapted

    @property
    def device(self) -> torch.device:
        """Present device of the network."""
        return self.network.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights that are not quantised."""
        return self.network.head.weight.dtype

    @abstractmethod
    def modules(self) -> Sequence[nn.Module]:
        """Modules that sampling and replay need on the accelerator."""

    @abstractmethod
    def source_modules(self) -> Sequence[nn.Module]:
        """Modules that `encode_sources` needs on the accelerator."""

    @abstractmethod
    def tokens_per_image(self, batch: PromptBatch) -> int:
        """T, the number of tokens of each image of a batch."""

    @abstractmethod
    def token_places(self, batch: PromptBatch) -> TokenPlaces:
        """Which places of an image each of its T tokens covers, for credit by place."""

    @abstractmethod
    def encode_sources(self, batch: PromptBatch) -> PromptBatch:
        """Encode the batch's source images as tokens; without any, return it unchanged."""

    @abstractmethod
    def tokenize_images(
        self,
        pixels: UInt8[Tensor, "N 3 H W"],
        *,
        num_sources: int = 0,
        preview: Preview = "zeros",
    ) -> Int64[Tensor, "N T"]:
        """Encode images as token grids that the decoder turns back into them.

        Args:
            pixels: RGB, 0..255, of a size that can be generated.
            num_sources: Number of source images; above 0 the grids are those of edits.
            preview: How to make tokens that the model draws before those of the image, if it
                does; see `sft.preview`. The decoder does not read them.
        """

    @abstractmethod
    def run_network_once(self) -> None:
        """Run `network` on the smallest possible input, without gradient."""

    def encode(self, batch: PromptBatch) -> Any:
        """Encode the prompts of a batch, one row each; the last batch is cached."""
        if self._encoded is None or self._encoded[0] is not batch:
            self._encoded = (batch, self._encode(batch))
        return self._encoded[1]

    @abstractmethod
    def _encode(self, batch: PromptBatch) -> Any: ...

    @abstractmethod
    def _read_prompts(self, batch: PromptBatch) -> ReadPrompts:
        """Read encoded prompts before their tokens are sampled."""

    @abstractmethod
    def _choose_step(self, prompts: Any) -> StepBuilder:
        """Choose the step that reads one token of every sample."""

    @abstractmethod
    def _sequences(self, batch: PromptBatch, rollout: Rollout, rows: Int64[Tensor, " N"]) -> Any:
        """Prompts and tokens of some images, as inputs of the network."""

    def _attention_mask(
        self, prompt_mask: Int64[Tensor, "R L"], num_tokens: int
    ) -> Int64[Tensor, "R S"] | None:
        """Mask of prompts and tokens; None without padding, as for samples of one prompt."""
        if prompt_mask.all():
            return None
        generated = prompt_mask.new_ones(len(prompt_mask), num_tokens - 1)
        return torch.cat([prompt_mask, generated], dim=1).to(self.device)

    def _sampling_mask(
        self, rollout: Rollout, rows: Int64[Tensor, " N"]
    ) -> Bool[Tensor, "N T V"] | None:
        if rollout.sampling_mask is None:
            return None
        return rollout.sampling_mask.flatten(0, 1)[rows].to(self.device)

    def _num_preview(self, batch: PromptBatch) -> int:
        """Number of preview tokens at the start of each sequence."""
        return 0

    def sample(
        self,
        batch: PromptBatch,
        *,
        phase: str = "rollout",
        on_progress: ProgressCallback = no_progress,
    ) -> Rollout:
        """Sample G token grids for each of P prompts, a pure function of weights and batch.

        Args:
            phase: Phase of the run, for errors.
            on_progress: Called after every token of the grids.

        Raises:
            NonFiniteError: A log-probability is not finite; the message names phase, prompt, sample
                and token.
        """
        # Outside, because autograd cannot use tensors that were made inside.
        self.encode(batch)
        # Cheaper than `no_grad`, because no small operation records anything; copies are returned.
        with torch.inference_mode(), held_factors(self.network.language_model):
            prompts = self._read_prompts(batch)
            if self._build_step is None:
                self._build_step = self._choose_step(prompts)
            step = self._build_step(self.network, prompts, batch.group_size)
            states = prompts.states.repeat_interleave(batch.group_size, dim=0)
            num_tokens = prompts.num_tokens
            # The step keeps what it needs of them.
            del prompts
            sampled = sample_grids(
                states,
                step,
                self._sample_tokens,
                batch,
                num_tokens=num_tokens,
                on_progress=on_progress,
            )
        return join_tokens(sampled, batch, phase, self.dtype)

    def _sample_tokens(
        self, states: Float[Tensor, "R D"], uniforms: Float64[Tensor, " N"]
    ) -> SampledTokens:
        """Sample one token of each grid; uniforms are in [0, 1)."""
        return sample_tokens(self.network.logits(states), self._truncation, uniforms)

    @override
    def replay(self, batch: PromptBatch, rollout: Rollout, rows: Int64[Tensor, " N"]) -> Replay:
        sequences = self._sequences(batch, rollout, rows)
        with self._recomputing():
            log_probs, entropy, outside_codebook = self._wrapped(sequences)
        return Replay(
            log_probs,
            entropy=entropy,
            outside_codebook=outside_codebook,
            num_preview=self._num_preview(batch),
        )

    def wrap(self, wrapped: nn.Module) -> None:
        """Replay through a wrapper of `network` from now on, which joins gradients of processes."""
        self._wrapped = wrapped

    @override
    def trainable_parameters(self) -> Sequence[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def first_layers(self, count: int) -> Any:
        """A copy in float32 with only the first layers, which runs the same code.

        It shows whether sampling and replay compute the same, which half precision at full depth
        cannot. Adapters have small random factors in it.

        Args:
            count: Number of layers of the language model, >= 1.
        """
        network = self.network
        own = set(network.modules())
        # What the network does not contain is shared, and so are embeddings, which compute nothing.
        memo: dict[int, Any] = {
            id(module): module
            for module in self.model.modules()
            if own.isdisjoint(module.modules())
        }
        language_model = network.language_model
        memo[id(language_model.embed_tokens)] = _Float32Embedding(language_model.embed_tokens)
        memo |= {id(layer): nn.Identity() for layer in language_model.layers[count:]}
        copied = copy.copy(self)
        copied.model, copied.network, copied._adapted = copy.deepcopy(
            (self.model, network, self._adapted), memo
        )
        copied._wrapped, copied.reference = copied.network, Reference()
        copied._encoded = copied._build_step = None
        language_model = copied.network.language_model
        language_model.layers = language_model.layers[:count]
        language_model.config.num_hidden_layers = count
        dequantize(copied.network)
        generator = torch.Generator().manual_seed(0)
        for name, weight in copied.network.float().named_parameters():
            if "lora_B" in name:
                noise = torch.randn(weight.shape, generator=generator)
                weight.data.copy_(_ADAPTER_STD * noise)
        return copied

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Recompute activations in the backward pass, if that is wanted, of what runs inside.

        Only a module in training mode recomputes them; there is no dropout to switch on.
        """
        language_model = self.network.language_model
        language_model.train(torch.is_grad_enabled())
        try:
            yield
        finally:
            language_model.eval()

    def reference_log_probs(
        self, batch: PromptBatch, rollout: Rollout, rows: Int64[Tensor, " N"]
    ) -> Float32[Tensor, "N T"]:
        """Score the tokens of these rows under the reference policy, without gradient."""
        return self.reference.log_probs(self._sequences(batch, rollout, rows))

    @torch.no_grad()
    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Load initial weights, named as in `state_tensors`, into policy and reference."""
        self.load_state_tensors(tensors)
        self.reference.start_from_policy()

    def state_tensors(self) -> dict[str, Tensor]:
        """Trained tensors by name: the adapters, or the network."""
        if self._adapted is not None:
            return adapter_tensors(self._adapted)
        return dict(self.network.state_dict())

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state_tensors` returned."""
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
