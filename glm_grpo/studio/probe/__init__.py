"""`glm-grpo probe`: what each reward term measures on the base model."""
