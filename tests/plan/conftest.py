"""Plans by hand where a test brings `SimplePlanner`, the product's elsewhere."""

from __future__ import annotations

import pytest

from glm_grpo.plan.memory import plan_memory
from tests.plan.simple_planner import SimplePlanner


@pytest.fixture(autouse=True)
def simple_plans(monkeypatch):
    """Lets `SimplePlanner` add up its bytes itself."""

    def plan(planner, *arguments, **options):
        if isinstance(planner, SimplePlanner):
            return planner.plan(*arguments, **options)
        return plan_memory(planner, *arguments, **options)

    monkeypatch.setattr("glm_grpo.plan.fit.plan_memory", plan)
