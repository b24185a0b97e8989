"""A Ray cluster to collect in: one of the run's own on this machine, or one that is there."""

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
from dataclasses import dataclass

import torch

from glm_grpo.errors import ConfigError

AUTO = "auto"
"""Address of the cluster that this machine is part of, or that RAY_ADDRESS names."""

_CONNECT_SECONDS = 10.0
_DEVICES = "CUDA_VISIBLE_DEVICES"
_PRIVATE: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Every process of the cluster asks for the run's token, which travels in the environment.
    "RAY_AUTH_MODE": "token",
    # A connection that was closed is not opened again by whatever is asked next.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    # Has Ray listen on the loopback address alone, on Linux too.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Of a cluster of the run's own; read by Ray where it is imported first."""


@dataclass(frozen=True)
class Needs:
    """What the collectors of a run take.

    Attributes:
        collectors: How many, >= 1.
        cpus: Cores of each, >= 1.
        gpus: Accelerators of each, >= 0; a fraction shares one.
    """

    collectors: int
    cpus: int
    gpus: float


def require_ray() -> None:
    """Refuses an asynchronous run where Ray is not installed.

    Raises:
        ConfigError: It is not.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "train.mode = 'async': its collectors are processes that Ray keeps, and Ray is not "
            "installed; pip install 'glm-grpo[ray]', or set train.mode=sync"
        )


class RayCluster:
    """A connection to a cluster; closed at the latest when the process ends.

    A cluster of the run's own listens on the loopback address, asks for a token that only the run
    knows, keeps its files in a folder that only the user can read, and ends with the run.

    Args:
        address: Of a cluster that is there, `host:port` or `auto`; None starts one on this machine.
        needs: What the collectors take.

    Raises:
        ConfigError: There is no cluster, or it is too small.
    """

    def __init__(self, address: str | None, needs: Needs) -> None:
        self._folder: str | None = None
        if address is None:
            self._start(needs)
        else:
            self._connect(address)
        atexit.register(self.close)
        self._check(address, needs)

    def close(self) -> None:
        """Leaves the cluster, and ends it if it is the run's own."""
        import ray  # noqa: PLC0415

        atexit.unregister(self.close)
        ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self, needs: Needs) -> None:
        os.environ.update(_PRIVATE)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        import ray  # noqa: PLC0415

        # Not where TMPDIR says: the paths of Ray's sockets have at most 107 characters.
        self._folder = tempfile.mkdtemp(prefix="glm-ray-", dir="/tmp")
        with _others_visible():
            ray.init(
                address="local",
                num_cpus=needs.collectors * needs.cpus,
                include_dashboard=False,
                logging_level="error",
                # Ray opens its own folder to every user; the one around it stays closed.
                _temp_dir=f"{self._folder}/ray",
            )

    def _connect(self, address: str) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray  # noqa: PLC0415

        try:
            if address != AUTO:
                # Ray itself would try for five minutes.
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
            ray.init(address=address, logging_level="error")
        except (OSError, RuntimeError, ray.exceptions.RayError) as error:
            raise ConfigError(
                f"async.address = {address!r}: there is no Ray cluster that can be connected to "
                f"({str(error).strip().partition(chr(10))[0]}); start one by `ray start --head` "
                "and give its address and, in RAY_AUTH_TOKEN, its token; or set "
                "async.address=null for one on this machine"
            ) from error

    def _check(self, address: str | None, needs: Needs) -> None:
        import ray  # noqa: PLC0415

        there = ray.cluster_resources()
        for key, each, name in (
            ("cpus_per_collector", needs.cpus, "CPU"),
            ("gpus_per_collector", needs.gpus, "GPU"),
        ):
            wanted = needs.collectors * each
            if wanted > there.get(name, 0.0):
                self.close()
                place = "this machine" if address is None else f"the cluster at {address}"
                spare = (
                    "; one more is the learner's"
                    if address is None and torch.cuda.device_count() > 1 and name == "GPU"
                    else ""
                )
                raise ConfigError(
                    f"async.{key} = {each}: {needs.collectors} collectors (async.collectors) need "
                    f"{wanted:g} {name}s, and {place} has {there.get(name, 0.0):g} for them{spare};"
                    f" lower async.collectors or async.{key}"
                )


@contextmanager
def _others_visible() -> Iterator[None]:
    """Hides the learner's accelerator from the cluster, where there is another one."""
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
