"""GRPO fine-tuning of AR-plus-diffusion image models."""
