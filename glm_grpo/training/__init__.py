"""The training loop and what stands around it: prompts, records, checkpoints, evaluation."""
