"""Score perceptual similarity to the target image, with LPIPS."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor, nn

from rewards.base import (
    FLOAT32_BYTES,
    Against,
    ComparingConfig,
    Reward,
    check_side,
    compared_picture,
    stack_compared,
    to_unit_range,
)
from rewards.types import Prompt, RewardError, describe_error

Network = Literal["alex", "vgg", "squeeze"]

SMALLEST_SIDES: dict[Network, int] = {"alex": 31, "vgg": 16, "squeeze": 17}
"""Smallest side in pixels for which a backbone's strides leave any output."""

_UNTRAINED_SEED = 0

_logger = logging.getLogger(__name__)


class LpipsConfig(ComparingConfig):
    """LPIPS to the prompt's target image, as 1 - distance."""

    kind: Literal["lpips"]
    """Class that scores."""
    network: Literal["alex", "vgg", "squeeze"] = "alex"
    """Backbone. torchvision downloads its weights once into TORCH_HOME/hub/checkpoints."""
    pretrained: bool = True
    """False: untrained features from a fixed seed. Needs no download, but does not measure
    perception."""

    def build(self, device: torch.device) -> Reward:
        """See `TermConfig`."""
        return LpipsReward(
            self.network, pretrained=self.pretrained, device=device, against=self.against
        )

    def memory_bytes(self) -> int:
        """Size of backbone and linear layers, from the package."""
        parameters = {"alex": 2_470_848, "vgg": 14_716_160, "squeeze": 724_736}
        return parameters[self.network] * FLOAT32_BYTES


class LpipsReward:
    """1 - LPIPS distance: 1 for equal pictures, lower the more they differ, not bounded below.

    Version 0.1 of the metric with the package's linear layers, averaged over the picture.
    Source: Zhang et al., The Unreasonable Effectiveness of Deep Features as a Perceptual Metric,
    CVPR 2018, https://github.com/richzhang/PerceptualSimilarity.

    Args:
        network: Backbone.
        pretrained: False for untrained features from a fixed seed, the paper's "random" baseline,
            which needs no download. Unweighted differences are averaged over layers, not summed as
            in the paper: a layer's difference is at most 2, so scores stay in -1..1 like those of
            other terms.
        device: Device for the network.
        against: Picture of the prompt to compare with.

    Raises:
        RewardError: The backbone's weights are missing and cannot be downloaded.
    """

    def __init__(
        self,
        network: Network,
        *,
        pretrained: bool,
        device: torch.device,
        against: Against = "target",
    ) -> None:
        self._against: Against = against
        self._smallest_side = SMALLEST_SIDES[network]
        model = _load_pretrained(network) if pretrained else _make_untrained(network)
        self._divisor: int = 1 if pretrained else model.L  # the package's name for its layers
        self._model: nn.Module = model.to(device).eval().requires_grad_(False)

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether the prompt has the picture to compare with."""
        return compared_picture(prompt, self._against) is not None

    @torch.no_grad()
    def score(
        self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "N 3 H W"]
    ) -> Float32[Tensor, " N"]:
        """Compare each picture with that of its prompt.

        Raises:
            ValueError: The prompt's picture is missing, has another size, or is too small for the
                backbone.
        """
        check_side(pixels, self._smallest_side)
        device = next(self._model.parameters()).device
        # A group shares its target, which therefore goes through the network once.
        first = compared_picture(prompts[0], self._against)
        is_shared = all(compared_picture(each, self._against) is first for each in prompts)
        compared = prompts[:1] if is_shared else prompts
        stacked = stack_compared(compared, pixels[: len(compared)], self._against)
        targets = to_unit_range(stacked, device)
        pictures = to_unit_range(pixels, device)
        # normalize=True: the package scales 0..1 to -1..1, on which it works.
        distance: Tensor = self._model(pictures, targets, normalize=True)
        return 1 - distance.reshape(len(prompts)) / self._divisor

    def modules(self) -> tuple[nn.Module, ...]:
        """The backbone with its linear layers."""
        return (self._model,)


def _load_pretrained(network: Network) -> Any:
    try:
        return _construct(network, is_trained=True)
    except (OSError, RuntimeError) as error:
        url = _weights_url(network)
        place = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
        raise RewardError(
            f"lpips: the weights of backbone {network!r} cannot be loaded "
            f"({describe_error(error)}). They are needed at {place}: download {url} there, set "
            "TORCH_HOME to a folder that has it under hub/checkpoints, choose another "
            "lpips.network, or set lpips.pretrained=false for untrained features"
        ) from error


def _weights_url(network: Network) -> str:
    from torchvision.models import (  # noqa: PLC0415
        AlexNet_Weights,
        SqueezeNet1_1_Weights,
        VGG16_Weights,
    )

    weights = {
        "alex": AlexNet_Weights.IMAGENET1K_V1,
        "vgg": VGG16_Weights.IMAGENET1K_V1,
        "squeeze": SqueezeNet1_1_Weights.IMAGENET1K_V1,
    }
    url: str = weights[network].url
    return url


@cache
def _tell_untrained(network: Network) -> None:
    """Warn once per process, however many networks are created."""
    _logger.warning(
        "lpips: untrained %s features (pretrained: false); distances compare structure but do "
        "not measure human perception",
        network,
    )


def _make_untrained(network: Network) -> Any:
    _tell_untrained(network)
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
