"""`glm-grpo serve-reward`: serve a reward term over HTTP."""

from __future__ import annotations

from collections.abc import Callable

from glm_grpo.config import Config
from glm_grpo.errors import ConfigError
from glm_grpo.training.distributed.strategy import make_accelerator
from rewards.serve import serve


def serve_term(
    config: Config, name: str, *, host: str, port: int, announce: Callable[[str], None]
) -> None:
    """Serve one term of the config over HTTP until Ctrl-C or SIGTERM."""
    terms = config.reward.terms
    if name not in terms:
        raise ConfigError(
            f"{name!r} is not a term of this config ({', '.join(terms)}); name one of them, or add "
            f"it: +reward.terms.{name}.weight=1"
        )
    device = make_accelerator().device
    serve(terms[name], name=name, device=device, host=host, port=port, announce=announce)
