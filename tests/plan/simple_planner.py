"""A planner whose bytes can be worked out by hand; what models take is tested beside them."""

from __future__ import annotations

from glm_grpo.models.base import DTYPES
from glm_grpo.models.planning import UNDIVIDED, MemoryItem, MemoryPlan, Planner
from glm_grpo.plan.memory import training_batch

PHASES = ("rollout", "decode", "update", "idle")


class SimplePlanner(Planner):
    """Two networks, activations in proportion to what is worked on at once.

    Attributes:
        asked: The processes of every plan.
    """

    def __init__(self):
        self.asked = []

    def plan(self, config, *, prompt_tokens, is_on_accelerator, parallelism=UNDIVIDED):
        self.asked.append(parallelism)
        model, decode = config.model, config.decode
        batch = training_batch(config, prompt_tokens=prompt_tokens, processes=parallelism.count)
        entry = DTYPES[model.dtype].itemsize
        policy = 1000 * entry if model.quantization is None else 500
        decoder = 500 * entry if decode.quantization is None else 500
        trained = 4000 if model.adapter is None else 10 * model.adapter.rank
        drawn = min(decode.batch_size or batch.group_size, batch.group_size)
        kept = 2500 if model.gradient_checkpointing else 10_000
        is_moving = config.offload != "none" and is_on_accelerator
        state_phases = ("update",) if config.offload == "modules_and_optimizer" else PHASES
        items = (
            self._item("policy", policy, ("rollout", "update") if is_moving else PHASES),
            self._item("decoder", decoder, ("decode",) if is_moving else PHASES),
            self._item("state", 2 * trained, state_phases if is_moving else PHASES),
            self._item("gradients", trained, ("update",)),
            self._item("cache", 500 * batch.images, ("rollout",)),
            self._item("images", 10_000 * drawn, ("decode",)),
            self._item(
                "activations", kept * min(config.train.micro_batch_size, batch.images), ("update",)
            ),
        )
        return MemoryPlan(items, PHASES, is_on_accelerator, 0, 0, 0, 0)

    usual_prompt_tokens = 256
    smaller_sides = (1024, 768, 512, 256)

    def longest_prompt_tokens(self, captions, *, height, width):
        return 30

    @staticmethod
    def _item(name, size, phases):
        return MemoryItem(name, dict.fromkeys(phases, size))
