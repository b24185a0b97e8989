"""The mathematics of GRPO: tensors and floats in, named dataclasses out.

Nothing here knows a model class or a file; of the config only the sections `advantage` and `loss`,
which are declared here. `advantages` turns the rewards of a group into advantages, `losses` holds
the kinds of loss and the KL estimators, `update` drives one rollout's optimizer updates.
"""
