"""Scores of pictures: terms, the table of their raw scores, and the ways of weighing it.

Nothing here knows how the pictures were made; this package never imports `glm_grpo`.
"""
