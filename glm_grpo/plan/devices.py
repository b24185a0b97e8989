"""Published figures of devices: their memory, and their peak performance."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

_OTHER_FORMS = ("pcie", "nvl", "laptop", "mig")
"""Variants and parts (MIG) of a device that has the same name, with different performance."""

_GB = 10**9


@dataclass(frozen=True)
class DeviceSpeed:
    """Published figures of a device.

    Attributes:
        bandwidth: Memory bandwidth, bytes per second.
        flops: Operations per second in 16 bits on dense matrices, accumulated in fp32.
        link: Bandwidth to and from CPU memory, bytes per second in each direction.
        flops_in_float32: The same in fp32, without TF32, which torch leaves off; None: as in 16
            bits.
        memory: Bytes; of a device with several sizes, the one in `name`. None if unknown.
        has_bfloat16: Whether `flops` are also those of bfloat16, rather than of float16 alone.
    """

    name: str
    bandwidth: float
    flops: float
    link: float
    flops_in_float32: float | None = None
    memory: int | None = None
    has_bfloat16: bool = True

    def in_dtype(self, dtype: str) -> DeviceSpeed:
        """The device with the operations per second of a dtype, named as in `model.dtype`."""
        if dtype != "float32" or self.flops_in_float32 is None:
            return self
        return replace(self, flops=self.flops_in_float32)


DEVICES: Mapping[str, DeviceSpeed] = {
    "a100": DeviceSpeed("A100 80GB SXM", 2.039e12, 312e12, 32e9, 19.5e12, 80 * _GB),
    "h100": DeviceSpeed("H100 SXM", 3.35e12, 989.5e12, 64e9, 67e12, 80 * _GB),
    "h200": DeviceSpeed("H200 SXM", 4.8e12, 989.5e12, 64e9, 67e12, 141 * _GB),
    "l4": DeviceSpeed("L4", 300e9, 121e12, 32e9, 30.3e12, 24 * _GB),
    "l40s": DeviceSpeed("L40S", 864e9, 362.05e12, 32e9, 91.6e12, 48 * _GB),
    "rtx3090": DeviceSpeed("RTX 3090", 936e9, 71e12, 32e9, 35.6e12, 24 * _GB),
    "rtx4060ti": DeviceSpeed("RTX 4060 Ti 16GB", 288e9, 44.1e12, 16e9, 22.1e12, 16 * _GB),
    "rtx4080": DeviceSpeed("RTX 4080", 716.8e9, 97.5e12, 32e9, 48.7e12, 16 * _GB),
    "rtx4090": DeviceSpeed("RTX 4090", 1.008e12, 165.2e12, 32e9, 82.6e12, 24 * _GB),
    "t4": DeviceSpeed("T4", 320e9, 65e12, 16e9, 8.1e12, 16 * _GB, has_bfloat16=False),
    "v100": DeviceSpeed(
        "V100 SXM2 16GB", 900e9, 125e12, 16e9, 15.7e12, 16 * _GB, has_bfloat16=False
    ),
}
"""Halved if the maker counts sparsity, or both directions of PCIe.

Source: nvidia.com/en-us/data-center/ a100, h100, h200, l4, l40s, tesla-t4 and v100; RTX 4080 and
4090: NVIDIA Ada GPU Architecture, appendix A (images.nvidia.com/aem-dam/Solutions/geforce/ada/
nvidia-ada-gpu-architecture.pdf); RTX 4060 Ti: the same architecture's rates, with its 34
multiprocessors at 2.54 GHz; RTX 3090: NVIDIA Ampere GA102 GPU Architecture, appendix A.
"""

KNOWN = ", ".join(DEVICES)
"""Names of all devices, for messages."""


@dataclass(frozen=True)
class Hardware:
    """What a run is planned for.

    Attributes:
        devices: Devices whose minimum times are shown; several if only their memory was given.
        memory: Bytes; None: do not check whether they suffice.
    """

    devices: Sequence[DeviceSpeed]
    memory: int | None = None


def hardware_with(memory: int) -> Hardware:
    """The known devices with as much memory; there may be none."""
    return Hardware([each for each in DEVICES.values() if each.memory == memory], memory)


def find_device(name: str) -> DeviceSpeed | None:
    """Find the performance of a device by the driver's name, such as `NVIDIA H200`.

    Returns None for unknown devices.

    Args:
        name: Name from `torch.cuda.get_device_name`.
    """
    written = name.lower()
    if any(form in written for form in _OTHER_FORMS):
        return None
    # One word each: an RTX 4080 SUPER, an RTX 4090 D, an L40 and a T400 are other devices.
    words = re.split(r"[\s-]+", re.sub(r"(?<=rtx) | (?=(ti|super|d)\b)", "", written))
    return next((speed for key, speed in DEVICES.items() if key in words), None)


def without_bfloat16(name: str, *, is_denoising: bool) -> str:
    """Say what to do on a device that does not compute in bfloat16.

    Args:
        is_denoising: Whether the decoder denoises, as that of GLM-Image does.
    """
    remedy = "set model.dtype=float16"
    if is_denoising:
        remedy += "; prefer Janus-Pro, because GLM-Image's decoder stays in bfloat16"
    return f"model.dtype is bfloat16, which {name} can only emulate, slowly: {remedy}"
