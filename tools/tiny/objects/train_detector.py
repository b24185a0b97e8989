"""Stage `detector`: train a stock RT-DETRv2 to find whole shapes, and only those.

A policy under reward draws what the detector takes for a shape. So images also show shapes that a
person would not count: with cells missing or exchanged, or stretched to a rectangle or an oval.
They have no box.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from PIL import Image, ImageFilter
from torch import Tensor
from transformers import RTDetrResNetConfig, RTDetrV2Config, RTDetrV2ForObjectDetection

from glm_grpo.tiny.objects import world
from tools.tiny.stage import Schedule, train_stage

_BATCH = 16
_WHOLE, _BROKEN = 0.02, 0.1
"""Fractions of a shape's pixels that changed: up to the first it is whole, from the second on it is
broken; what is between is not shown."""
_CHANGED = 40
"""Difference of levels from which a pixel has changed."""
_NAMES = {colour: name for name, colour in world.COLOURS.items()}


@dataclass(frozen=True)
class Example:
    """An image with the shapes that count.

    Attributes:
        pixels: 128 x 128.
        labels: Index of each shape into `world.SHAPES`.
        boxes: Its left, top, right and bottom edges, in pixels.
    """

    pixels: UInt8[np.ndarray, "H W 3"]
    labels: list[int]
    boxes: list[tuple[float, float, float, float]]


def build_detector(*, seed: int) -> RTDetrV2ForObjectDetection:
    """0.8 million parameters, for images of 128 x 128 pixels."""
    body = RTDetrResNetConfig(
        embedding_size=32,
        hidden_sizes=[32, 48, 64, 96],
        depths=[1] * 4,
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    config = RTDetrV2Config(
        backbone_config=body,
        freeze_backbone_batch_norms=False,
        encoder_in_channels=[48, 64, 96],
        feat_strides=[8, 16, 32],
        encoder_hidden_dim=64,
        d_model=64,
        decoder_in_channels=[64] * 3,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        encoder_layers=1,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        hidden_expansion=0.5,
        num_queries=16,
        num_denoising=8,
        id2label=dict(enumerate(world.SHAPES)),
        label2id={shape: index for index, shape in enumerate(world.SHAPES)},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return RTDetrV2ForObjectDetection(config)


def train_detector(
    model: RTDetrV2ForObjectDetection, *, steps: int, folder: Path, seed: int
) -> None:
    """Train all of `model` in place."""
    model.train().requires_grad_(True)

    def loss_at(
        rng: np.random.Generator, generator: torch.Generator, step: int
    ) -> Float32[Tensor, ""]:
        # The class draws its noisy queries from the global generator.
        torch.manual_seed(int(rng.integers(2**31)))
        examples = [random_example(rng) for _ in range(_BATCH)]
        labels = [
            {"class_labels": torch.tensor(each.labels, dtype=torch.int64), "boxes": _centred(each)}
            for each in examples
        ]
        return model(pixel_values=unit_pixels(examples), labels=labels).loss

    train_stage(
        "detector",
        (model,),
        loss_at,
        schedule=Schedule(steps=steps, learning_rate=1e-3, warmup_steps=200),
        folder=folder,
        seed=seed,
    )
    model.eval().requires_grad_(False)


def unit_pixels(examples: list[Example]) -> Float32[Tensor, "B 3 H W"]:
    """Images of a batch, 0..1."""
    pixels = np.stack([each.pixels for each in examples])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255.0


def random_example(rng: np.random.Generator) -> Example:
    """Draw an image: as the policy should, as it does when it fails, or of any sizes and places."""
    kind = rng.random()
    if kind < 0.3:
        example = clean_example(rng)
    elif kind < 0.7:
        example = broken_example(rng)
    else:
        example = free_example(rng)
    return _degraded(example, rng) if rng.random() < 0.3 else example


def clean_example(rng: np.random.Generator) -> Example:
    """An image of the world, with one to five shapes; blocks may lie side by side."""
    return _example_of(_random_shapes(rng))


def broken_example(rng: np.random.Generator) -> Example:
    """An image of the world whose cells are partly missing, exchanged, shifted or repeated."""
    while True:
        shapes = _random_shapes(rng)
        cells = world.scene_cells(shapes)
        for _ in range(int(rng.integers(1, 4))):
            _break(cells, shapes, rng)
        drawn = world.draw_cells(cells).permute(1, 2, 0).numpy()
        found = [*_whole_ones(drawn)]
        if None not in found:
            whole = [shape for shape in found if shape is not None]
            return Example(drawn, *_labels_and_boxes(whole))


def free_example(rng: np.random.Generator) -> Example:
    """Shapes of 20 to 48 pixels at any place, some stretched, on a ground of any light colour."""
    ground = np.clip(np.array(world.GROUND) + rng.integers(-30, 31, 3), 0, 255)
    pixels = np.empty((world.SIZE, world.SIZE, 3), np.uint8)
    pixels[:] = ground
    labels, boxes, taken = [], [], np.zeros(pixels.shape[:2], bool)
    for _ in range(int(rng.integers(1, 6))):
        index = int(rng.integers(len(world.SHAPES)))
        is_stretched = rng.random() < 0.25
        height, width = _free_size(rng, is_stretched=is_stretched)
        top = int(rng.integers(world.SIZE - height + 1))
        left = int(rng.integers(world.SIZE - width + 1))
        place = slice(top, top + height), slice(left, left + width)
        if taken[place].any():
            continue
        taken[place] = True
        colour = tuple(world.COLOURS.values())[rng.integers(len(world.COLOURS))]
        jittered = np.clip(np.array(colour) + rng.integers(-15, 16, 3), 0, 255)
        opaque = _opacity(world.SHAPES[index], height, width)
        pixels[place] = opaque * jittered + (1 - opaque) * pixels[place]
        if not is_stretched:
            labels.append(index)
            boxes.append(_bounds(opaque[..., 0] > 0.5, left=left, top=top))
    return Example(pixels, labels, boxes)


def _random_shapes(rng: np.random.Generator) -> tuple[world.Shape, ...]:
    wanted = tuple(
        world.Wanted(world.SHAPES[rng.integers(len(world.SHAPES))])
        for _ in range(int(rng.integers(1, 6)))
    )
    return world.arrange(world.Request(wanted), rng)


def _break(cells: Tensor, shapes: tuple[world.Shape, ...], rng: np.random.Generator) -> None:
    """Change some cells in place."""
    shape = shapes[rng.integers(len(shapes))]
    rows = slice(shape.top, shape.top + shape.side)
    columns = slice(shape.left, shape.left + shape.side)
    row, column = (int(each) for each in rng.integers(shape.side, size=2))
    how = int(rng.integers(6))
    if how == 0:  # a cell is missing
        cells[shape.top + row, shape.left + column] = 0
    elif how == 1:  # a cell of another shape, or of another colour
        cells[shape.top + row, shape.left + column] = int(rng.integers(len(world.cell_atlas())))
    elif how == 2:  # a fragment in an empty place
        empty = (cells == 0).nonzero()
        cells[tuple(empty[rng.integers(len(empty))])] = int(rng.integers(len(world.cell_atlas())))
    elif how == 3:  # one side is missing
        if rng.random() < 0.5:
            cells[shape.top + (0 if row == 0 else shape.side - 1), columns] = 0
        else:
            cells[rows, shape.left + (0 if column == 0 else shape.side - 1)] = 0
    elif how == 4 and shape.side == 3:  # a large shape without its middle
        if rng.random() < 0.5:
            cells[shape.top + 1, columns] = cells[shape.top + 2, columns]
            cells[shape.top + 2, columns] = 0
        else:
            cells[rows, shape.left + 1] = cells[rows, shape.left + 2]
            cells[rows, shape.left + 2] = 0
    elif shape.top + shape.side < world.GRID:  # stretched by a row
        below = slice(shape.top + 1, shape.top + shape.side + 1)
        cells[below, columns] = cells[rows, columns].clone()
        if shape.side == 3:
            cells[shape.top + 1, columns] = cells[shape.top + 2, columns]


def _whole_ones(drawn: UInt8[np.ndarray, "H W 3"]) -> Iterator[world.Shape | None]:
    """Every shape that an image of cells shows whole; None for one of which this is not clear."""
    for side in world.SIDES:
        size = side * world.CELL
        for row, column in product(range(world.GRID - side + 1), repeat=2):
            top, left = row * world.CELL, column * world.CELL
            part = drawn[top : top + size, left : left + size]
            # The middle of every shape has its colour.
            colour = _NAMES.get(tuple(part[size // 2, size // 2]))
            if colour is None:
                continue
            for kind in world.SHAPES:
                template, opaque = _templates()[kind, side, colour]
                is_changed = np.abs(part.astype(int) - template).max(-1) > _CHANGED
                changed = is_changed.sum() / opaque.sum()
                if changed <= _WHOLE:
                    yield world.Shape(kind, colour, side, row, column)
                elif changed < _BROKEN:
                    yield None


@functools.cache
def _templates() -> dict[tuple[str, int, str], tuple[np.ndarray, np.ndarray]]:
    """Pixels of every shape, and where they differ from the ground."""
    found = {}
    for kind, side, colour in product(world.SHAPES, world.SIDES, world.COLOUR_NAMES):
        block = world.draw_shape(kind, world.COLOURS[colour], side * world.CELL)
        pixels = np.asarray(block).astype(int)
        is_opaque = np.abs(pixels - np.array(world.GROUND)).max(-1) > _CHANGED
        found[kind, side, colour] = pixels, is_opaque
    return found


def _example_of(shapes: tuple[world.Shape, ...]) -> Example:
    drawn = world.draw_cells(world.scene_cells(shapes)).permute(1, 2, 0).numpy()
    return Example(drawn, *_labels_and_boxes(shapes))


def _labels_and_boxes(
    shapes: tuple[world.Shape, ...] | list[world.Shape],
) -> tuple[list[int], list[tuple[float, float, float, float]]]:
    labels, boxes = [], []
    for each in shapes:
        _, is_opaque = _templates()[each.shape, each.side, each.colour]
        labels.append(world.SHAPES.index(each.shape))
        boxes.append(_bounds(is_opaque, left=each.left * world.CELL, top=each.top * world.CELL))
    return labels, boxes


def _bounds(is_opaque: np.ndarray, *, left: int, top: int) -> tuple[float, float, float, float]:
    """Left, top, right and bottom edge of what is opaque in a block at a place."""
    rows, columns = np.nonzero(is_opaque)
    return (
        float(left + columns.min()),
        float(top + rows.min()),
        float(left + columns.max() + 1),
        float(top + rows.max() + 1),
    )


def _free_size(rng: np.random.Generator, *, is_stretched: bool) -> tuple[int, int]:
    size = int(rng.integers(20, 49))
    if not is_stretched:
        return size, size
    other = max(14, int(size * rng.uniform(0.4, 0.72)))
    return (size, other) if rng.random() < 0.5 else (other, size)


def _opacity(kind: str, height: int, width: int) -> Float32[np.ndarray, "h w 1"]:
    """Where a shape covers the ground, 0..1; without the margin of its block."""
    block = world.draw_shape(kind, (0, 0, 0), 4 * world.CELL)
    inner = block.crop((2, 2, 4 * world.CELL - 2, 4 * world.CELL - 2))
    dark = 1 - np.asarray(inner.resize((width, height), Image.Resampling.BOX)) / np.array(
        world.GROUND
    )
    return dark.mean(-1, keepdims=True).clip(0, 1).astype(np.float32)


def _degraded(example: Example, rng: np.random.Generator) -> Example:
    """The image, blurred or compressed a little."""
    image = Image.fromarray(example.pixels)
    if rng.random() < 0.5:
        image = image.filter(ImageFilter.GaussianBlur(float(rng.uniform(0.3, 0.9))))
    else:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=int(rng.integers(25, 70)))
        image = Image.open(buffer).convert("RGB")
    return Example(np.asarray(image), example.labels, example.boxes)


def _centred(example: Example) -> Float32[Tensor, "n 4"]:
    """Boxes as centre, width and height, in fractions of the image."""
    boxes = torch.tensor(example.boxes, dtype=torch.float32).reshape(-1, 4) / world.SIZE
    return torch.cat([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], dim=1)
