"""Score perceptual similarity to the target image, with LPIPS."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor, nn
from typing_extensions import override

from rewards.base import (
    FLOAT32_BYTES,
    ComparingConfig,
    ComparingReward,
    Reward,
    compared_image,
    stack_compared,
    to_unit_range,
)
from rewards.score_map import Grid, map_on_grid
from rewards.types import Prompt, RewardError, Scores, describe_error

Network = Literal["alex", "vgg", "squeeze"]

_UNTRAINED_SEED = 0


class LpipsConfig(ComparingConfig):
    """LPIPS to the prompt's target image, as 1 - distance."""

    score_map = "always"

    kind: Literal["lpips"]
    """Class that scores."""
    network: Network = "alex"
    """Backbone. torchvision downloads its weights once into TORCH_HOME/hub/checkpoints."""
    pretrained: bool = True
    """False: untrained features from a fixed seed. Needs no download, but does not measure
    perception."""

    @override
    def build(self, device: torch.device) -> Reward:
        return LpipsReward(self, device)

    @override
    def memory_bytes(self) -> int:
        """Size of backbone and linear layers, from the package."""
        parameters = {"alex": 2_470_848, "vgg": 14_716_160, "squeeze": 724_736}
        return parameters[self.network] * FLOAT32_BYTES


class LpipsReward(ComparingReward):
    """1 - LPIPS distance: 1 for equal images, lower the more they differ, not bounded below.

    Version 0.1 of the metric with the package's linear layers, averaged over the image.
    Source: Zhang et al., The Unreasonable Effectiveness of Deep Features as a Perceptual Metric,
    CVPR 2018, https://github.com/richzhang/PerceptualSimilarity.

    Untrained features are the paper's "random" baseline. Their unweighted differences are averaged
    over layers, not summed as in the paper: a layer's difference is at most 2, so scores stay in
    -1..1 like those of other terms.

    Raises:
        RewardError: The backbone's weights are missing and cannot be downloaded.
    """

    def __init__(self, config: LpipsConfig, device: torch.device) -> None:
        super().__init__(config.against)
        make = _load_pretrained if config.pretrained else _make_untrained
        model = make(config.network)
        # `L` is the package's number of layers.
        self._divisor: int = 1 if config.pretrained else model.L
        self._model: Any = model.to(device).eval().requires_grad_(False)

    @torch.no_grad()
    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        """Compare each image with that of its prompt."""
        return self._value([average for average, _ in self._layers(prompts, pixels)])

    @torch.no_grad()
    def score_with_map(self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]) -> Scores:
        """Like `score`; every place has an equal share of the 1, less its part of the distance.

        The maps of all layers are brought to the resolution of the first, which is the finest, by
        area: interpolated maps would not keep their means.
        """
        averages, maps = zip(*self._layers(prompts, pixels), strict=True)
        grid = Grid(*maps[0].shape[1:])
        distances = maps[0] / len(grid)
        for each in maps[1:]:
            share = each / each[0].numel()
            distances += map_on_grid(share, grid, height=pixels.shape[2], width=pixels.shape[3])
        return Scores(self._value(averages), score_map=1 / len(grid) - distances / self._divisor)

    @override
    def modules(self) -> tuple[nn.Module, ...]:
        """The backbone with its linear layers."""
        return (self._model,)

    def _value(self, averages: Sequence[Float32[Tensor, " N"]]) -> Float32[Tensor, " N"]:
        return 1 - sum(averages[1:], start=averages[0]) / self._divisor

    def _layers(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Iterator[tuple[Float32[Tensor, " N"], Float32[Tensor, "N h w"]]]:
        """Distance of each image in each layer of the backbone: its mean, and its map.

        This is `lpips.LPIPS.forward`, which does not return maps of a layer's own resolution.
        """
        device = next(self._model.parameters()).device
        # A group shares its target, which therefore goes through the network once.
        first = compared_image(prompts[0], self._against)
        is_shared = all(compared_image(each, self._against) is first for each in prompts)
        compared = prompts[:1] if is_shared else prompts
        stacked = stack_compared(compared, pixels[: len(compared)], self._against)
        targets = to_unit_range(stacked, device)
        images = to_unit_range(pixels, device)
        features, others = self._features(images), self._features(targets)
        for layer, (own, other) in enumerate(zip(features, others, strict=True)):
            squares = (own - other) ** 2
            distances: Float32[Tensor, "N 1 h w"] = (
                self._model.lins[layer](squares)
                if self._model.lpips
                else squares.sum(dim=1, keepdim=True)
            )
            yield distances.mean(dim=(2, 3))[:, 0], distances[:, 0]

    def _features(self, images: Float32[Tensor, "N 3 H W"]) -> list[Float32[Tensor, "N C h w"]]:
        import lpips  # noqa: PLC0415

        # The package works on -1..1.
        layers = self._model.net(self._model.scaling_layer(2 * images - 1))
        return [lpips.normalize_tensor(layer) for layer in layers]


def _load_pretrained(network: Network) -> Any:
    try:
        return _construct(network, is_trained=True)
    except (OSError, RuntimeError) as error:
        raise RewardError(
            f"lpips: the weights of backbone {network!r} cannot be loaded "
            f"({describe_error(error)}). torchvision downloads them once into "
            f"{Path(torch.hub.get_dir()) / 'checkpoints'}: copy them there, set TORCH_HOME to a "
            "folder that has them under hub/checkpoints, choose another lpips.network, or set "
            "lpips.pretrained=false for untrained features"
        ) from error


def _make_untrained(network: Network) -> Any:
    # torch.manual_seed would seed every device; weights are drawn on the CPU, whose generator
    # fork_rng restores.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_UNTRAINED_SEED)
        return _construct(network, is_trained=False)


def _construct(network: Network, *, is_trained: bool) -> Any:
    # With torchvision it takes seconds to import, which other configs should not wait for.
    import lpips  # noqa: PLC0415

    with warnings.catch_warnings():
        # The package uses an argument name that torchvision has deprecated.
        warnings.filterwarnings("ignore", category=UserWarning, module="torchvision")
        return lpips.LPIPS(
            net=network,
            version="0.1",
            lpips=is_trained,
            pnet_rand=not is_trained,
            verbose=False,
        )
