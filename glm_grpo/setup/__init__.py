"""Set a run up: check and prepare it, load its models, build what learns, and the trainer."""
