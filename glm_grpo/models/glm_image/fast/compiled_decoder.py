"""Compile the decoder's networks, and check that they decode the same images as the eager ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from diffusers import AutoencoderKL, GlmImageTransformer2DModel
from jaxtyping import Float
from torch import Tensor

from glm_grpo.models.compiling import COMPILING, reason_of

CHECKED_STEPS = 4
"""Most denoising steps of the compared images, because rounding grows with every step."""

_UNSEEN = 0.05 / 255
"""Mean difference of RGB values that is always accepted: a sixth of the difference between bf16 and
fp32, measured on the embedded model."""

_OF_ROUNDING = 2
"""Accepted multiple of the rounding difference: both differences are of the same size, and chance
decides which is larger (0.97 and 1.0 levels in bf16 on an H200)."""

_logger = logging.getLogger(__name__)


class CompiledDecoder:
    """Blocks of the diffusion transformer and decoder of the VAE, compiled in place.

    They run eagerly until `check` has compared them with the eager ones, and stay eager if they
    differ or cannot be compiled.

    Args:
        transformer: Without layerwise casting, which cannot be compiled.
    """

    def __init__(self, transformer: GlmImageTransformer2DModel, vae: AutoencoderKL) -> None:
        # Dynamic, because every length of the glyphs would otherwise be compiled again.
        transformer.compile_repeated_blocks(dynamic=True, options=COMPILING)
        vae.decoder.compile(options=COMPILING)
        self._is_checked = self.is_used = False

    @contextmanager
    def running(self, *, is_eager: bool = False) -> Iterator[None]:
        """Run the compiled networks inside, unless `check` rejected them or `is_eager`."""
        is_used = self.is_used and not is_eager
        with torch.compiler.set_stance("default" if is_used else "force_eager"):
            yield

    def check(self, decode: Callable[[int], Float[Tensor, "N 3 H W"]], images: int) -> None:
        """Decide at the first call whether to use the compiled networks.

        They may differ from the eager ones by twice the rounding, which is the difference between
        an image that is decoded alone and the same image decoded in a batch.

        Args:
            decode: Decodes the first N of the images, RGB in 0..1.
            images: Number of them.
        """
        if self._is_checked:
            return
        self._is_checked = True
        eager, alone = decode(images), decode(1)
        reason = self._difference(decode, eager, rounding=_mean_difference(eager[:1], alone))
        self.is_used = not reason
        if reason:
            _logger.warning(
                "the decoder is not compiled (%s): images are decoded eagerly, which is slower; "
                "decode.compile=false skips the attempt",
                reason,
            )

    def _difference(
        self,
        decode: Callable[[int], Float[Tensor, "N 3 H W"]],
        eager: Float[Tensor, "N 3 H W"],
        *,
        rounding: float,
    ) -> str:
        """Reason to fall back to the eager networks; empty if there is none."""
        self.is_used = True
        try:
            difference = _mean_difference(decode(len(eager)), eager)
        # The same images were decoded eagerly just now, so compiling causes this, whatever it is.
        except Exception as error:
            return reason_of(error)
        allowed = max(_OF_ROUNDING * rounding, _UNSEEN)
        if difference <= allowed:
            return ""
        return (
            f"its images differ by {255 * difference:.2g} of 255 levels on average, more than "
            f"the {255 * allowed:.2g} that rounding explains"
        )


def _mean_difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().mean())
