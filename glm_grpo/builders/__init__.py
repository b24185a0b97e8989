"""Config -> models, prompts, plain values, trainer; nothing else constructs."""
