"""The mathematics of GRPO: tensors and floats in, named dataclasses out.

Nothing here knows a model class, a file or a config. `advantages` turns the rewards of a group
into advantages, `losses` holds the clipped surrogate and the KL estimators, `update` drives one
rollout's optimizer updates through the protocols of `replay` and `engine`.
"""
