"""Measure the values in the embedded model's card: `python -m tools.tiny.measure [FOLDER]`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

import torch
from diffusers import GlmImagePipeline
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from glm_grpo import load_config
from glm_grpo.models.glm_image.decoder import GlmImageDecoder
from glm_grpo.models.glm_image.loading import load_pipeline
from glm_grpo.models.glm_image.policy import GlmImagePolicy
from glm_grpo.models.glm_image.prompt_inputs import image_tokens
from glm_grpo.models.glm_image.token_grid import token_layout
from glm_grpo.seeds import derive_seed
from glm_grpo.tiny import world
from glm_grpo.tiny.prompts import tiny_prompts
from glm_grpo.types import PromptBatch
from rewards.base import score_checked
from rewards.terms.ocr import OcrReward
from rewards.terms.ocr_rapidocr import RapidOcrReader
from rewards.terms.ssim import SsimReward
from rewards.types import Prompt

_LAYOUT = token_layout(world.SIZE, world.SIZE)


@dataclass(frozen=True)
class Reading:
    """OCR results on images.

    Attributes:
        similarity: Mean score of the `ocr` term.
        exact: Fraction of images read without a mistake.
    """

    similarity: float
    exact: float


class Embedded:
    """The embedded model, with methods to measure it.

    Args:
        folder: Pipeline in the diffusers layout.
    """

    def __init__(self, folder: Path, *, steps: int) -> None:
        self.pipeline: GlmImagePipeline = load_pipeline(str(folder), dtype=torch.float32)
        self.decoder = GlmImageDecoder(self.pipeline, steps=steps, guidance_scale=1.0)
        self._ocr = OcrReward(RapidOcrReader(threads=2, detection_side=256))
        self._ssim = SsimReward(torch.device("cpu"))
        held_out = tiny_prompts("heldout", height=world.SIZE, width=world.SIZE)
        self.prompts = tuple(held_out[index] for index in range(len(held_out)))
        self.originals = torch.stack([world.draw_sign(sign) for sign in held_out.signs])

    def reconstruction(self) -> Int64[Tensor, "P S"]:
        """Target tokens of the held-out images, from the model's own vision tower and VQ."""
        model, processor = self.pipeline.vision_language_encoder, self.pipeline.processor
        return image_tokens(model, processor, self.originals)

    def draw(
        self, prompts: tuple[Prompt, ...], target: Int64[Tensor, "P S"]
    ) -> UInt8[Tensor, "P 3 H W"]:
        """Decode target tokens, one image per prompt."""
        preview = torch.zeros(len(target), _LAYOUT.num_preview, dtype=torch.int64)
        token_ids = torch.cat([preview, target], dim=1).unsqueeze(1)
        return self.decoder.decode(self.batch(prompts, group_size=1), token_ids).pixels[:, 0]

    def batch(self, prompts: tuple[Prompt, ...], *, group_size: int) -> PromptBatch:
        """Make a batch of these prompts with fixed seeds."""
        seeds = tuple(derive_seed(0, "measure", prompt.prompt_id) for prompt in prompts)
        return PromptBatch(prompts, group_size, world.SIZE, world.SIZE, seed=0, decode_seeds=seeds)

    def read(self, prompts: tuple[Prompt, ...], pixels: UInt8[Tensor, "P 3 H W"]) -> Reading:
        """Compare the text read in each image with its prompt's text."""
        scores = score_checked(self._ocr, prompts, pixels).values
        return Reading(scores.mean().item(), (scores == 1).float().mean().item())

    def similarity(self, pixels: UInt8[Tensor, "P 3 H W"]) -> Float32[Tensor, " P"]:
        """Structural similarity of images to the originals."""
        return self._ssim.score(self.prompts, pixels)

    def sample(self, *, group_size: int) -> Reading:
        """Sample the policy at temperature 1 on all held-out prompts, and read the images."""
        config = load_config("tiny", "rollout.temperature=1.0", "model.adapter=null")
        policy = GlmImagePolicy(config, self.pipeline)
        batch = self.batch(self.prompts, group_size=group_size)
        rollout = policy.sample(batch)
        pixels = self.decoder.decode(batch, rollout.token_ids).pixels.flatten(0, 1)
        repeated = tuple(prompt for prompt in self.prompts for _ in range(group_size))
        return self.read(repeated, pixels)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    shipped = Path(str(files("glm_grpo.tiny") / "weights" / "pipeline"))
    parser.add_argument("folder", type=Path, nargs="?", default=shipped)
    parser.add_argument("--steps", type=int, default=4, help="denoising steps")
    parser.add_argument("--group", type=int, default=4, help="samples a prompt")
    options = parser.parse_args()
    embedded = Embedded(options.folder, steps=options.steps)
    tokens = embedded.reconstruction()
    drawn = embedded.draw(embedded.prompts, tokens)
    others = embedded.prompts[1:] + embedded.prompts[:1]
    swapped = embedded.draw(others, tokens)
    report = {
        "originals read": asdict(embedded.read(embedded.prompts, embedded.originals)),
        "own tokens decoded, SSIM": embedded.similarity(drawn).mean().item(),
        "own tokens decoded, read": asdict(embedded.read(embedded.prompts, drawn)),
        "decoded under another prompt, own word read": asdict(
            embedded.read(embedded.prompts, swapped)
        ),
        "sampled at temperature 1, read": asdict(embedded.sample(group_size=options.group)),
    }
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
