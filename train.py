"""Train from the command line: argv -> config -> build -> train.

python train.py [--config-name NAME] [key=value ...]        one run
python train.py -m key=value,value ...                      a sweep, one run after another
accelerate launch train.py [key=value ...]                  one run on several processes
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Imports take seconds; before errors are explained, Ctrl-C ends the program without a word.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import hydra
from omegaconf import DictConfig

from glm_grpo.terminal import (
    announce_loading,
    ended_in_any_case,
    job_errors_explained,
    run_hydra_application,
)
from glm_grpo.training.interrupt import interrupt


@hydra.main(version_base=None, config_path="configs", config_name="tiny")
def train(composed: DictConfig) -> None:
    """Validate what Hydra composed, and train."""
    with job_errors_explained():
        announce_loading(composed)
        # Libraries take seconds: the first line does not wait for them, nor does a mistake in the
        # config for those of the models.
        from glm_grpo.config import load_config  # noqa: PLC0415

        config = load_config(composed)
        from glm_grpo.commands.train import run_training  # noqa: PLC0415

        run_training(config)


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, interrupt)
    with ended_in_any_case():
        run_hydra_application(train)
