"""`glm-grpo compare`: runs side by side, with intervals."""
