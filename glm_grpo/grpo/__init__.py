"""The mathematics of GRPO, and the optimizer updates that use it.

Formulas take tensors and floats, and return tensors or named dataclasses: `advantages` and `credit`
turn the rewards of a group into advantages, `surrogates` and `losses` contain the policy losses and
the KL estimators. `update` runs the updates of one rollout, or of target images (`supervised`), for
any policy that can replay tokens (`policy`), in one process or several (`strategy`).
Nothing here knows a model class or a file; only losses and updates see a section of the config.
"""
