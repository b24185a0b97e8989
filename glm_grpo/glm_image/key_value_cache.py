"""A key/value cache of fixed size: prefilled once per prompt, shared out to its group."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class PreallocatedLayer(DynamicLayer):
    """A layer that writes into room made beforehand instead of growing by concatenation.

    Behaves as `DynamicLayer` to the model: attention sees exactly the tokens written so far.
    """

    def __init__(self, capacity: int, group_size: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.group_size = group_size
        self._room: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends the states of new tokens.

        The first call is the prefill, with a row per prompt: it is attended to as it is, and
        stored once for every member of the group.
        """
        if self._room is None:
            return self._prefill(key_states, value_states)
        start, end = self.get_seq_length(), self.get_seq_length() + key_states.shape[-2]
        views = []
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, start:end] = states
            views.append(room[:, :, :end])
        self.keys, self.values = views
        return self.keys, self.values

    def _prefill(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        self.lazy_initialization(key_states, value_states)
        rooms = []
        for states in (key_states, value_states):
            batch, heads, length, size = states.shape
            room = states.new_empty(batch * self.group_size, heads, self.capacity, size)
            room[:, :, :length] = states.repeat_interleave(self.group_size, dim=0)
            rooms.append(room)
        self._room = (rooms[0], rooms[1])
        self.keys, self.values = (room[:, :, : key_states.shape[-2]] for room in rooms)
        return key_states, value_states


def group_cache(*, num_layers: int, capacity: int, group_size: int) -> Cache:
    """A cache whose rows are P prompts in the first call and P * G samples from then on.

    Args:
        num_layers: Decoder layers.
        capacity: Tokens a row can hold: prompt and generated ones.
        group_size: G.
    """
    return Cache(layers=[PreallocatedLayer(capacity, group_size) for _ in range(num_layers)])
