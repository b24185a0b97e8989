"""Connect to a Ray cluster for collection: a private one on this machine, or a running one."""

from __future__ import annotations

import atexit
import importlib.util
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from glm_grpo.config.sections import AsyncSection
from glm_grpo.errors import ConfigError

AUTO = "auto"
"""Address of the cluster that includes this machine, or that RAY_ADDRESS names."""

_CONNECT_SECONDS = 10.0
_DEVICES = "CUDA_VISIBLE_DEVICES"
_PRIVATE: Mapping[str, str] = {
    # Every process of the cluster needs the run's token, which the environment passes on.
    "RAY_AUTH_MODE": "token",
    # Later calls do not reopen a closed connection.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    # Makes Ray listen only on the loopback address, on Linux too.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Environment of a private cluster; Ray reads it on first import."""


def require_ray() -> None:
    """Refuse an asynchronous run if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "train.mode = 'async': its collectors run under Ray, which is not installed; run `pip "
            "install 'glm-grpo[ray]'`, or set train.mode=sync"
        )


class RayCluster:
    """A connection to a cluster, closed at the latest when the process ends.

    A private cluster listens on the loopback address, requires a token that only the run knows,
    keeps its files in a folder that only the user can read, and ends with the run.

    Args:
        section: Address of a running cluster, and the resources of the collectors.

    Raises:
        ConfigError: There is no such cluster, or it is too small.
    """

    def __init__(self, section: AsyncSection) -> None:
        self._folder: str | None = None
        if section.address is None:
            self._start(section)
        else:
            self._connect(section.address)
        atexit.register(self.close)
        self._check(section)

    def close(self) -> None:
        """Disconnect from the cluster, and stop it if it is private."""
        import ray  # noqa: PLC0415

        atexit.unregister(self.close)
        ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self, section: AsyncSection) -> None:
        os.environ.update(_PRIVATE)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        import ray  # noqa: PLC0415

        # Not in TMPDIR, because the paths of Ray's sockets are limited to 107 characters.
        self._folder = tempfile.mkdtemp(prefix="glm-ray-", dir="/tmp")
        with _others_visible():
            ray.init(
                address="local",
                num_cpus=section.collectors * section.cpus_per_collector,
                include_dashboard=False,
                logging_level="error",
                # Ray opens its own folder to every user; the folder around it stays private.
                _temp_dir=f"{self._folder}/ray",
            )

    def _connect(self, address: str) -> None:
        import ray  # noqa: PLC0415

        try:
            if address != AUTO:
                # Ray itself would retry for five minutes.
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
            ray.init(address=address, logging_level="error")
        except (OSError, RuntimeError, ray.exceptions.RayError) as error:
            raise ConfigError(
                f"async.address = {address!r}: cannot connect to a Ray cluster "
                f"({str(error).strip().partition(chr(10))[0]}); start one with `ray start --head`, "
                "then set async.address to its address and RAY_AUTH_TOKEN to its token; or set "
                "async.address=null for one on this machine"
            ) from error

    def _check(self, section: AsyncSection) -> None:
        import ray  # noqa: PLC0415

        there, address = ray.cluster_resources(), section.address
        for key, each, name in (
            ("cpus_per_collector", section.cpus_per_collector, "CPU"),
            ("gpus_per_collector", section.gpus_per_collector, "GPU"),
        ):
            wanted = section.collectors * each
            if wanted > there.get(name, 0.0):
                self.close()
                place = "this machine" if address is None else f"the cluster at {address}"
                spare = (
                    "; the learner has one more"
                    if address is None and torch.cuda.device_count() > 1 and name == "GPU"
                    else ""
                )
                raise ConfigError(
                    f"async.{key} = {each}: {section.collectors} collectors (async.collectors) "
                    f"need {wanted:g} {name}s, and {place} has {there.get(name, 0.0):g} for "
                    f"them{spare}; lower async.collectors or async.{key}"
                )


@contextmanager
def _others_visible() -> Iterator[None]:
    """Hide the learner's accelerator from the cluster if there is another one."""
    before = os.environ.get(_DEVICES)
    count = torch.cuda.device_count()
    if count > 1:
        devices = [str(index) for index in range(count)] if before is None else before.split(",")
        os.environ[_DEVICES] = ",".join(devices[1:])
    try:
        yield
    finally:
        if before is not None:
            os.environ[_DEVICES] = before
        elif count > 1:
            del os.environ[_DEVICES]
