"""`glm-grpo rescore`: what other weights would have made of the stored scores."""
