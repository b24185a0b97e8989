"""Derive seeds as a pure function of their purpose, so that resuming needs no generator state."""

from __future__ import annotations

import hashlib
import json

SEED_BITS = 63
"""torch takes 64-bit seeds; tables and JSON readers take signed 64-bit integers. 63 bits fit
both."""


def derive_seed(*parts: int | str) -> int:
    """Hash some parts into one seed.

    BLAKE2b over the JSON text of the parts. Unlike `hash`, the result is the same on every machine
    and Python; unlike with `seed + step`, seeds of neighbouring steps are unrelated.

    Args:
        parts: Purpose of the seed, for instance (run seed, "decode", step, prompt row). Order and
            type matter: 1 and "1" differ, and so do ("a", "b") and ("ab",).

    Returns:
        An integer in 0 .. 2**63 - 1.

    Source: BLAKE2, RFC 7693.
    """
    text = json.dumps(parts, separators=(",", ":"))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)
