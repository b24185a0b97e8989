"""Find, read, check and deal out prompts and target images."""
