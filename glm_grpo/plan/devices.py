"""Published peak performance of devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

_OTHER_FORMS = ("pcie", "nvl", "laptop")
"""Variants that the driver gives the same name, with different performance."""


@dataclass(frozen=True)
class DeviceSpeed:
    """Published peak performance of a device.

    Attributes:
        bandwidth: Memory bandwidth, bytes per second.
        flops: Operations per second in 16 bits on dense matrices, accumulated in fp32.
        link: Bandwidth to and from CPU memory, bytes per second in each direction.
        flops_in_float32: The same in fp32, without TF32, which torch leaves off; None: as in 16
            bits.
    """

    name: str
    bandwidth: float
    flops: float
    link: float
    flops_in_float32: float | None = None

    def in_dtype(self, dtype: str) -> DeviceSpeed:
        """The device with the operations per second of a dtype, named as in `model.dtype`."""
        if dtype != "float32" or self.flops_in_float32 is None:
            return self
        return replace(self, flops=self.flops_in_float32)


DEVICES: Mapping[str, DeviceSpeed] = {
    "a100": DeviceSpeed(
        "A100 80GB SXM", bandwidth=2.039e12, flops=312e12, link=32e9, flops_in_float32=19.5e12
    ),
    "h100": DeviceSpeed(
        "H100 SXM", bandwidth=3.35e12, flops=989.5e12, link=64e9, flops_in_float32=67e12
    ),
    "h200": DeviceSpeed(
        "H200 SXM", bandwidth=4.8e12, flops=989.5e12, link=64e9, flops_in_float32=67e12
    ),
    "l40s": DeviceSpeed(
        "L40S", bandwidth=864e9, flops=362.05e12, link=32e9, flops_in_float32=91.6e12
    ),
    "rtx4090": DeviceSpeed(
        "RTX 4090", bandwidth=1.008e12, flops=165.2e12, link=32e9, flops_in_float32=82.6e12
    ),
}
"""Halved if the maker counts sparsity, or both directions of PCIe.

Source: nvidia.com/en-us/data-center/ a100, h100, h200 and l40s; RTX 4090: NVIDIA Ada GPU
Architecture, appendix A (images.nvidia.com/aem-dam/Solutions/geforce/ada/
nvidia-ada-gpu-architecture.pdf).
"""


def find_device(name: str) -> DeviceSpeed | None:
    """Find the performance of a device by the driver's name, such as `NVIDIA H200`.

    Returns None for unknown devices.

    Args:
        name: Name from `torch.cuda.get_device_name`.
    """
    written = name.replace(" ", "").lower()
    if any(form in written for form in _OTHER_FORMS):
        return None
    return next((speed for key, speed in DEVICES.items() if key in written), None)
