"""The mathematics of GRPO: tensors and floats in, named dataclasses out.

Nothing here knows a model class or a file; only losses and updates see a section of the config.
`advantages` turns the rewards of a group into advantages, `surrogates` and `losses` contain the
policy losses and the KL estimators, `update` runs the optimizer updates of one rollout.
"""
