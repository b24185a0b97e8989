"""The mathematics of GRPO: tensors and floats in, named dataclasses out.

Nothing here knows a model class, a file or the config. `advantages` turns the rewards of a group
into advantages, `surrogates` and `losses` hold the policy losses and the KL estimators, `update`
drives one rollout's optimizer updates.
"""
