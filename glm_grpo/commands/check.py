"""`glm-grpo check`: everything that can be checked before a run."""

from __future__ import annotations

from collections.abc import Iterator

from glm_grpo.builders.models import (
    begin_with,
    find_planner,
    find_start,
    hint_at_size,
    load_models,
)
from glm_grpo.builders.prompts import (
    Prompts,
    build_batch,
    build_prompts,
    check_prompt_sets,
    hint_at_prompts,
    list_texts,
)
from glm_grpo.builders.settings import collect_settings
from glm_grpo.collectors.ray_cluster import require_ray
from glm_grpo.config import Config, effective_config
from glm_grpo.data.prompts import evaluation_batches
from glm_grpo.errors import ConfigError
from glm_grpo.models.planning import UNDIVIDED
from glm_grpo.models.quiet import quiet_libraries
from glm_grpo.plan.fit import check_fit, refuse_for_processes
from glm_grpo.run.trackers import check_trackers
from glm_grpo.training.collect import collect
from glm_grpo.training.distributed.strategy import make_accelerator
from glm_grpo.training.evaluate import evaluate, weigh_evaluation
from glm_grpo.training.phase import Models, PhaseClock, replay_size
from glm_grpo.training.replay_check import check_replay
from glm_grpo.types import Evaluation
from rewards.types import RewardTable


def check_config(config: Config) -> Iterator[str]:
    """Everything that can be checked before a run, cheapest first; yields what was found.

    Raises:
        GlmGrpoError, RewardError: The first check that fails.
    """
    quiet_libraries()
    check_trackers(config.trackers)
    if config.train.mode == "async":
        require_ray()
    effective = effective_config(config)
    config, note = effective.config, effective.note
    found = f"config: every key is known and in range{f'; {note}' if note else ''}"
    yield "\n    ".join([found, *hint_at_size(config)])
    yield f"processes: {_described_processes(config)}"
    prompts = build_prompts(config)
    found = f"data: {len(prompts.training)} training and {len(prompts.held_out)} held-out prompts"
    yield "\n    ".join([found, *list_texts(config, prompts), *hint_at_prompts(config, prompts)])
    sources = (prompts.training, prompts.held_out)
    device = make_accelerator().device
    yield f"memory: {check_fit(config, find_planner(config.model.path), sources, device)}"
    start = find_start(config)
    models = load_models(config, device, needs_reference=config.needs_reference)
    begin_with(models, start)
    yield f"model: loaded {config.model.path} in {config.model.dtype}"
    rare = check_prompt_sets(config, models, prompts)
    found = f"reward: {', '.join(models.scorer.names)}; every prompt has a term that applies"
    yield "\n    ".join([found, *rare])
    experience = collect(
        models,
        build_batch(config, prompts.training, 0),
        collect_settings(config),
        policy_step=0,
        clock=PhaseClock(),
    )
    yield f"one rollout: {_describe_means(experience.rewards)}"
    yield f"one held-out prompt: {_describe_means(_evaluate_one(models, config, prompts).rewards)}"
    rows = config.train.micro_batch_size
    with models.phase("update", replay_size(experience.prompts, models.policy, rows)):
        report = check_replay(models.policy, experience, rows=rows)
    yield (
        f"self-check: full grids, replay gap {report.mean_gap:.1e} nats a token (largest "
        f"{report.max_gap:.1e}), mean ratio {report.mean_ratio:.6f}"
    )


def _evaluate_one(models: Models, config: Config, prompts: Prompts) -> Evaluation:
    """The first held-out prompt as an evaluation scores it, which is not as training does."""
    batches = evaluation_batches(
        prompts.held_out,
        range(1),
        prompts_per_batch=1,
        samples_per_prompt=config.eval.samples_per_prompt,
        seed=config.eval.seed,
    )
    part = evaluate(models, batches, step=0)
    return weigh_evaluation([part], mode=config.reward.combine, untrained=None)


def _describe_means(table: RewardTable) -> str:
    """Mean score of each term over the prompts to which it applies."""
    scores = [
        (name, table.raw[table.is_applicable[:, column], :, column])
        for column, name in enumerate(table.names)
    ]
    return ", ".join(
        f"{name} {found.mean().item():z.3f}" if len(found) else f"{name} does not apply"
        for name, found in scores
    )


def _described_processes(config: Config) -> str:
    """How many can run the config; no reason to refuse it here, where there is always one."""
    try:
        refuse_for_processes(config, UNDIVIDED)
    except ConfigError as error:
        return f"a single one is refused by glm-grpo train: {error}"
    is_asynchronous = config.train.mode == "async"
    return "1" if is_asynchronous else f"1 to {config.rollout.prompts_per_step}"
