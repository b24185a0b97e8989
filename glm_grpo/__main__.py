"""Run the command line with `python -m glm_grpo`."""

from __future__ import annotations

from glm_grpo.cli import main

if __name__ == "__main__":
    main()
