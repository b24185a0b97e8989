from __future__ import annotations

import pytest

from glm_grpo.seeds import derive_seed


def test_derive_seed_is_the_same_on_every_machine() -> None:
    # printf '[0,"decoding",3]' | b2sum -l 64, without the last of its 64 bits.
    assert derive_seed(0, "decoding", 3) == 0x0CAA65D367F4EA21 >> 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1,), ("1",)),
        (("a", "b"), ("ab",)),
        ((1, 2), (2, 1)),
        ((0, "order", 1), (0, "order", 2)),
        ((), ("",)),
    ],
)
def test_derive_seed_differs_when_the_parts_do(
    one: tuple[int | str, ...], other: tuple[int | str, ...]
) -> None:
    assert derive_seed(*one) != derive_seed(*other)


def test_derive_seed_fits_a_signed_64_bit_integer_and_uses_its_bits() -> None:
    seeds = [derive_seed("spread", index) for index in range(1000)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len(set(seeds)) == 1000
    # A fair highest bit: 500 expected of 1000, standard deviation 16.
    assert 400 < sum(seed >= 2**62 for seed in seeds) < 600
