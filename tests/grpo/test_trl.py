"""Losses and gradients are those of TRL's own code, run on the same tensors.

Skipped where TRL is not installed (`pip install 'glm-grpo[trl]'`); no other test needs it.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from glm_grpo.config.losses import AnyLoss, CispoLoss, ClippedLoss, SapoLoss
from glm_grpo.grpo.losses import LossInputs, grpo_loss

grpo_trainer = pytest.importorskip(
    "trl.trainer.grpo_trainer", reason="TRL is not installed: pip install 'glm-grpo[trl]'"
)

N, T = 6, 9
NO_KL: dict[str, Any] = {"kl_coef": 0.0, "kl_placement": "loss", "kl_behaviour_coef": 0.0}
KL: dict[str, Any] = {**NO_KL, "kl_coef": 0.3}


def clipped(**changes: Any) -> ClippedLoss:
    return ClippedLoss(**{"clip_low": 0.2, "clip_high": 0.3} | NO_KL | changes)


CASES: dict[str, tuple[AnyLoss, dict[str, Any]]] = {
    "clipped": (clipped(), {}),
    "two-sided": (clipped(two_sided_clip=2.0), {"delta": 2.0}),
    "k3": (clipped(**KL, kl_estimator="k3"), {"beta": 0.3}),
    "k3 corrected": (clipped(**KL), {"beta": 0.3, "use_bias_correction_kl": True}),
    "gspo": (
        clipped(ratio_level="sequence", clip_low=0.02, clip_high=0.03),
        {"importance_sampling_level": "sequence", "epsilon_low": 0.02, "epsilon_high": 0.03},
    ),
    "cispo": (
        CispoLoss(kind="cispo", max_ratio=1.5, **NO_KL),
        {"loss_type": "cispo", "epsilon_high": 1.5},
    ),
    "sapo": (
        SapoLoss(kind="sapo", tau_positive=1.0, tau_negative=1.05, **NO_KL),
        {"loss_type": "sapo"},
    ),
    "entropy": (clipped(entropy_coef=0.2), {"entropy_coef": 0.2, "_entropy_bonus_enabled": True}),
}


class Processes:
    """One process, as TRL asks accelerate for it."""

    num_processes = 1
    sync_gradients = True

    def gather(self, values: Tensor) -> Tensor:
        return values

    def reduce(self, values: Tensor, reduction: str) -> Tensor:
        return values


def their_loss(inputs: LossInputs, options: dict[str, Any]) -> Tensor:
    """Of `GRPOTrainer._compute_loss`, on log-probs that are given."""
    arguments = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "steps_per_generation": 1,
    }
    own: dict[str, Any] = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.3,
        "entropy_coef": 0.0,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "aux_loss_enabled": False,
        "use_vllm": False,
        "current_gradient_accumulation_steps": 1,
        "accelerator": Processes(),
        "model": SimpleNamespace(training=True),
        "_metrics": {"train": defaultdict(list)},
    }
    for name, value in options.items():
        (arguments if name in arguments else own)[name] = value
    scores = (inputs.log_probs, inputs.entropy, None)
    trainer = SimpleNamespace(
        **own,
        args=SimpleNamespace(**arguments),
        _get_per_token_logps_and_entropies=lambda *_, **__: scores,
    )
    ones = torch.ones(N, T, dtype=torch.long)
    batch = {
        "prompt_ids": ones[:, :1],
        "prompt_mask": ones[:, :1],
        "completion_ids": ones,
        "completion_mask": ones,
        "advantages": inputs.advantages.squeeze(1),
        "old_per_token_logps": inputs.old_log_probs,
        "ref_per_token_logps": inputs.reference_log_probs,
        "num_items_in_batch": torch.tensor(float(N * T)),
    }
    found: Tensor = grpo_trainer.GRPOTrainer._compute_loss(trainer, None, batch)
    return found


@pytest.mark.parametrize("scale", [0.02, 1.0])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_those_of_trl(case: str, scale: float) -> None:
    loss, options = CASES[case]
    generator = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(N, T, generator=generator).mul(4).add(0.1)
    noise = [scale * torch.randn(N, T, generator=generator) for _ in range(2)]
    inputs = LossInputs(
        log_probs=log_probs.requires_grad_(),
        old_log_probs=log_probs.detach() + noise[0],
        reference_log_probs=log_probs.detach() + noise[1],
        # One is of a zero-std group.
        advantages=torch.tensor([1.5, -0.5, 0.0, -1.0, 2.0, -2.0])[:, None],
        entropy=torch.rand(N, T, generator=generator).requires_grad_(),
    )
    at = (inputs.log_probs, inputs.entropy)
    ours, theirs = grpo_loss(inputs, loss).total, their_loss(inputs, options)

    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    found, expected = (torch.autograd.grad(each, at, allow_unused=True) for each in (ours, theirs))
    for own, other in zip(found, expected, strict=True):
        if own is None:
            assert other is None
        else:
            torch.testing.assert_close(own, other, atol=1e-7, rtol=1e-5)
