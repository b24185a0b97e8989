"""Train from the command line: argv -> config -> build -> train.

python train.py [--config-name NAME] [key=value ...]        one run
python train.py -m key=value,value ...                      a sweep, one run after another
accelerate launch train.py [key=value ...]                  one run on several processes
"""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig

from glm_grpo.commands import run_training
from glm_grpo.config import load_config
from glm_grpo.present import run_hydra_application


@hydra.main(version_base=None, config_path="configs", config_name="tiny")
def train(composed: DictConfig) -> None:
    """Validate what Hydra composed, and train."""
    exit_code = run_training(load_config(composed))
    if exit_code != 0:
        sys.exit(exit_code)


if __name__ == "__main__":
    run_hydra_application(train)
