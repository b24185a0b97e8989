"""Compare the decoder, a group at once, with the stock pipeline, image by image.

python -m benchmarks.decode [--groups 8 2 4 16] [--repeats 3] [--json FILE]

Both decode the same token grids of one prompt from the same noise, with the embedded model and the
steps and guidance of configs/tiny.yaml. The images are compared before anything is timed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers import GlmImagePipeline
from torch import Tensor

from benchmarks.embedded import first_batch, stock_pipeline, tiny_config
from benchmarks.timing import (
    Labels,
    Result,
    Target,
    compare,
    in_turns,
    option_parser,
    publish,
    rates,
)
from glm_grpo.config import Config
from glm_grpo.models.glm_image.decoder import GlmImageDecoder
from glm_grpo.models.glm_image.token_grid import target_token_ids, token_layout, upsample_token_ids
from glm_grpo.types import PromptBatch

TARGETS = {8: Target("at least", 2.0)}
"""Targets by images per prompt."""
TOLERANCE = 1e-4
"""Largest difference of a channel in 0..1: a fortieth of an 8-bit level."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = option_parser(__doc__)
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 2, 4, 16])
    options = parser.parse_args(arguments)
    publish([measure(size, options.repeats) for size in options.groups], options.json)


def measure(group_size: int, repeats: int) -> Result:
    """Decode a group both ways.

    Raises:
        RuntimeError: The two images differ.
    """
    config = tiny_config(prompts=1, group_size=group_size)
    batch = first_batch(config)
    # Two pipelines, so that the decoder's changes to its own do not affect the stock one.
    stock = stock_pipeline()
    steps, guidance_scale = config.decode.steps or 1, config.decode.guidance_scale or 1.0
    decoder = GlmImageDecoder(stock_pipeline(), steps=steps, guidance_scale=guidance_scale)
    layout = token_layout(batch.height, batch.width)
    generator = torch.Generator().manual_seed(0)
    codebook = stock.vision_language_encoder.config.vq_config.num_embeddings
    shape = (1, group_size, layout.num_tokens)
    token_ids = torch.randint(codebook, shape, generator=generator)
    prior = upsample_token_ids(target_token_ids(token_ids, layout), layout)[0]
    seed = batch.decode_seeds[0]
    drawn = decoder.decode_pixels(
        [batch.prompts[0].prompt], prior[None], [seed], batch.height, batch.width
    )
    difference = (drawn - draw_one_by_one(stock, config, batch, prior)).abs().max().item()
    if difference > TOLERANCE:
        raise RuntimeError(f"images differ by {difference}; at most {TOLERANCE} is rounding")
    seconds = in_turns(
        {
            "ours": lambda: decoder.decode(batch, token_ids),
            "stock": lambda: draw_one_by_one(stock, config, batch, prior),
        },
        repeats=repeats,
    )
    return compare(
        Labels(
            phase=f"decode 1 x {group_size}",
            against="stock pipeline, image by image",
            unit="images/s",
            command=f"python -m benchmarks.decode --groups {group_size} --repeats {repeats}",
        ),
        rates(group_size, seconds["ours"]),
        rates(group_size, seconds["stock"]),
        target=TARGETS.get(group_size),
        details={"largest_difference": difference},
    )


def draw_one_by_one(
    pipeline: GlmImagePipeline, config: Config, batch: PromptBatch, prior: Tensor
) -> Tensor:
    """Images [G, 3, H, W] in 0..1 of the first prompt, with one call per row of `prior`."""
    images: list[Tensor] = [
        pipeline(
            prompt=batch.prompts[0].prompt,
            prior_token_ids=row.unsqueeze(0),
            generator=torch.Generator().manual_seed(batch.decode_seeds[0]),
            height=batch.height,
            width=batch.width,
            num_inference_steps=config.decode.steps,
            guidance_scale=config.decode.guidance_scale,
            output_type="pt",
        ).images
        for row in prior
    ]
    return torch.cat(images)


if __name__ == "__main__":
    main()
