"""Train from a clone, as `glm-grpo train` does: argv -> config -> prepare -> train.

python train.py [--config-name NAME] [key=value ...]        one run
python train.py -m key=value,value ...                      a sweep, one run after another
accelerate launch train.py [key=value ...]                  one run on several processes

The algorithm in one file is examples/minimal_grpo.py. The loop is glm_grpo/training/loop.py; a step
samples and scores in collect.py beside it, and learns in glm_grpo/grpo/update.py.
"""

from __future__ import annotations

import sys

from glm_grpo.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    main()
