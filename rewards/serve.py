"""Serve one reward term to runs on this machine or another, from the command line.

python -m rewards.serve --name NAME --options-json '{"kind": ...}' [--host] [--port] [--device]

Clients need the token in the environment variable GLM_GRPO_REWARD_TOKEN, or the one that is made
and printed if it is unset. By default the server listens only on this machine, because there is no
encryption.
"""

from __future__ import annotations

import argparse
import hashlib
import ipaddress
import json
import logging
import os
import re
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from rewards.base import TermConfig
from rewards.build import build_reward
from rewards.config import RewardConfig
from rewards.messages import TOKEN_VARIABLE, ScorerInfo
from rewards.options import changeable_keys
from rewards.types import RewardError

LOOPBACK = "127.0.0.1"
"""Address that only this machine can reach."""

_USABLE_TOKEN = re.compile("[!-~]{16,}")

_logger = logging.getLogger(__name__)


def serve(
    term: TermConfig,
    *,
    name: str,
    device: torch.device,
    host: str,
    port: int,
    announce: Callable[[str], None],
) -> None:
    """Serve a term until Ctrl-C or SIGTERM; call it in the main thread, which receives signals.

    Args:
        host: Address to listen at; one that other machines can reach needs a token in the
            environment.
        port: Port; 0: any free port.
        announce: Called with the URL when requests are answered.
    """
    try:
        from rewards.http_server import listen, make_app, make_server  # noqa: PLC0415 (an extra)
    except ModuleNotFoundError as error:
        raise RewardError(
            f"{error.name}, which is needed to serve a term, is not installed; run `pip install "
            "'glm-grpo[serve]'`"
        ) from error

    given = _read_token(host)
    token = given or secrets.token_urlsafe()
    info = ScorerInfo(protocol=1, name=name, needs=tuple(term.needs()), digest=_digest(term))
    app = make_app(build_reward(term, device), info, token=token)
    try:
        listener, url = listen(host, port)
    except OSError as error:
        raise RewardError(
            f"cannot listen on {host} port {port} ({error}); choose another port, or 0 for any "
            "free one"
        ) from error
    if not _is_loopback(host):
        _logger.warning("%s: requests to %s are not encrypted, including the token", name, url)
    if given is None:
        # Not to standard output, which programs read and which is more often stored.
        sys.stderr.write(f"made a token for clients: export {TOKEN_VARIABLE}={token}\n")
    announce(url)
    with suppress(KeyboardInterrupt):
        make_server(app).run([listener])


def _digest(term: TermConfig) -> str:
    """Digest of the options that scores depend on, and of the code of a user's function."""
    others = {"weight", "std_floor", "prompt_ids", "when", *changeable_keys(term)}
    options = term.model_dump(mode="json", exclude=others, exclude_defaults=True)
    function = term.users_function()
    sources = {} if function is None else function.sources()
    content = json.dumps(options, sort_keys=True).encode() + b"".join(sources.values())
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _read_token(host: str) -> str | None:
    token = os.environ.get(TOKEN_VARIABLE)
    if token is not None and not _USABLE_TOKEN.fullmatch(token):
        raise RewardError(
            f"{TOKEN_VARIABLE} has {len(token)} characters, or some that no token has; it must be "
            "16 or more visible ASCII characters: export what `openssl rand -hex 32` prints"
        )
    if token is None and not _is_loopback(host):
        raise RewardError(
            f"host {host!r} can be reached from other machines, but there is no token; export "
            f"{TOKEN_VARIABLE} (`openssl rand -hex 32` makes one), or listen on {LOOPBACK}"
        )
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, or an empty string, which stands for every address
        return host == "localhost"


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the term of the command line, and serve it; exit code 1 if it cannot be built."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    # Of a notebook that starts this program: matplotlib, which terms import, may not know it.
    os.environ.pop("MPLBACKEND", None)
    parser = argparse.ArgumentParser(prog="python -m rewards.serve", description="Serve a scorer.")
    parser.add_argument("--name", required=True, help="name of the term, or of its kind")
    parser.add_argument("--options-json", default="{}", help="its section of the config, as JSON")
    parser.add_argument("--host", default=LOOPBACK, help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--device", default="cpu", help="device for networks, such as cuda:0")
    options = parser.parse_args(arguments)
    try:
        serve(
            _read_term(options.name, options.options_json),
            name=options.name,
            device=torch.device(options.device),
            host=options.host,
            port=options.port,
            announce=_announce,
        )
    # A config that is not valid is a ValueError.
    except (RewardError, ValueError) as error:
        sys.exit(f"{options.name}: {error}")


def _read_term(name: str, text: str) -> TermConfig:
    try:
        options = dict(json.loads(text))
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"--options-json {text!r} is not a JSON object ({error}); quote all of it"
        ) from error
    # The term is only scored here; the run weights it and decides when, so any valid weight will
    # do.
    section = {name: {**options, "weight": 1.0, "when": "always"}}
    return RewardConfig.model_validate({"terms": section, "allow_image_only": True}).terms[name]


def _announce(url: str) -> None:
    sys.stdout.write(f"listening on {url}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
