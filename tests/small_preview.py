"""Makes the preview of a rollout small in programs whose subject is not sampling."""

from __future__ import annotations


def shrink_preview() -> None:
    """Makes it 2 x 2 tokens in this process; see the fixture `small_preview`."""
    from glm_grpo.models.glm_image import token_grid  # noqa: PLC0415

    token_grid._PREVIEW_SIDE = 2
