"""Batches are a pure function of seed and step, and so are the prompts that replace others."""

from __future__ import annotations

from glm_grpo.setup.prepared_run import prepare
from glm_grpo.training.batches import build_batch, build_spares
from tests.factories import tiny_config


def test_spare_prompts_are_those_that_a_step_does_not_hold() -> None:
    config = tiny_config("rollout.prompts_per_step=3")
    prompts = prepare(config).prompts.training
    spares = build_spares(config, prompts, 4)
    whole, part = spares.batch(range(len(spares))), spares.batch(range(2, 5))
    batch = build_batch(config, prompts, 4)
    ids = [prompt.prompt_id for prompt in whole.prompts]
    assert len({*ids}) == len(ids) == len(prompts) - 3
    assert not {*ids} & {prompt.prompt_id for prompt in batch.prompts}
    assert build_spares(config, prompts, 4).rows == spares.rows
    assert build_spares(config, prompts, 5).rows != spares.rows
    assert [prompt.prompt_id for prompt in part.prompts] == ids[2:5]
    assert part.decode_seeds == whole.decode_seeds[2:5]
    assert part.seed == batch.seed
