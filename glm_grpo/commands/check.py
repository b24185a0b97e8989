"""`glm-grpo check`: check everything that can be checked before a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from glm_grpo.config import Config
from glm_grpo.data.prompts import evaluation_batches
from glm_grpo.errors import ConfigError, GlmGrpoError
from glm_grpo.models.base import ReservedTokens
from glm_grpo.models.find import find_model
from glm_grpo.models.planning import UNDIVIDED
from glm_grpo.models.quiet import quiet_libraries
from glm_grpo.plan.processes import refuse_for_processes
from glm_grpo.run.trackers import hint_at_trackers
from glm_grpo.setup.hints import hint_at_length, hint_at_prompts, hint_at_tags, list_asked
from glm_grpo.setup.prepared_run import PreparedRun, prepare
from glm_grpo.setup.prompts import Prompts, read_prompts
from glm_grpo.training.batches import build_batch
from glm_grpo.training.collect import collect
from glm_grpo.training.evaluate import evaluate, weigh_evaluation
from glm_grpo.training.models import Models
from glm_grpo.training.moving_average import share_of_change
from glm_grpo.training.out_of_memory import describe_replay
from glm_grpo.training.phases import PhaseClock
from glm_grpo.training.replay_check import check_code_path, check_replay
from glm_grpo.types import Evaluation
from rewards.types import RewardTable
from rewards.weighting import Mode, placed_share


def check_config(config: Config) -> Iterator[str]:
    """Check everything that can be checked before a run, cheapest first; yields the findings."""
    quiet_libraries()
    yield "config: every key is known and in range"
    yield f"processes: {_described_processes(config)}"
    try:
        prepared = prepare(config)
    except GlmGrpoError:
        yield from _describe_prompts_alone(config)
        raise
    config, prompts = prepared.config, prepared.prompts
    yield _describe_data(prompts, [*prepared.asked, *prepared.hints])
    if hints := hint_at_trackers(config.trackers):
        yield "\n    ".join([f"trackers: {', '.join(config.trackers)}", *hints])
    if prepared.note:
        yield f"settings: {prepared.note}"
    if config.eval.ema_decay is not None:
        yield f"average: {describe_average(config.eval.ema_decay, config.train.steps)}"
    yield f"memory: {prepared.memory}"
    scorer = prepared.load_scorer()
    weights = ", ".join(f"{name} {weight:g}" for name, weight in config.reward.weights().items())
    found = f"reward: {weights}; every prompt has a term that applies"
    yield "\n    ".join([found, *prepared.check_scored(scorer)])
    models = prepared.load(scorer)
    yield f"model: loaded {config.model.path} in {config.model.dtype}"
    batch = build_batch(config, prompts.training, 1)
    if found := check_code_path(models, batch):
        yield f"code path: {found}"
    # A supervised run keeps no reference, though its config may have a KL to one.
    sampled = config if config.needs_reference else config.without_reference()
    experience = collect(models, batch, sampled, clock=PhaseClock())
    yield f"one rollout: {_describe_means(experience.scores)}"
    if config.advantage.credit == "place":
        found = f"credit: {describe_credit(experience.scores, config.reward.combine)}"
        yield "\n    ".join([found, *hint_at_boxes(experience.scores)])
    yield f"one held-out prompt: {_describe_means(_evaluate_one(models, prepared).scores)}"
    rows = config.train.micro_batch_size
    with models.phase("update", describe_replay(experience.prompts, models.policy, rows)):
        report = check_replay(models.policy, experience.prompts, experience.rollout, rows=rows)
    yield f"self-check: full grids; sampling and replay differ by {report.describe()}"


def _describe_data(prompts: Prompts, lines: Iterable[str]) -> str:
    found = f"data: {len(prompts.training)} training and {len(prompts.held_out)} held-out prompts"
    return "\n    ".join([found, *lines])


def _describe_prompts_alone(config: Config) -> Iterator[str]:
    """Describe prompts whose run was refused, so that they can be mended before a download."""
    planner, text_rule = None, None
    with suppress(GlmGrpoError):
        model = find_model(config.model.path)
        # Of another path without files, the family is not known.
        if (planner := model.known_planner()) is not None:
            text_rule = model.family.TEXT_RULE
    # What is wrong with the prompts themselves is part of the refusal.
    with suppress(GlmGrpoError):
        prompts = read_prompts(config, ReservedTokens())
        lines = [
            *list_asked(config, prompts),
            *hint_at_prompts(config, prompts, text_rule),
            *hint_at_length(prompts, planner),
            *hint_at_tags(prompts),
        ]
        yield _describe_data(prompts, lines)


def describe_average(decay: float, steps: int) -> str:
    """Describe how far the evaluated and exported average is behind the last weights."""
    share = share_of_change(steps, decay)
    behind = steps * (1.0 - share)
    return (
        f"after train.steps = {steps}, eval.ema_decay = {decay:g} evaluates and exports weights "
        f"about {behind:.1f} steps behind the last ones; they hold {100 * share:.0f} % of what "
        "training changed, if it changes the weights evenly"
    )


def describe_credit(table: RewardTable, mode: Mode) -> str:
    """Describe which terms say what each place earned, and how much of the reward that is."""
    applies = table.is_applicable.any(dim=0) & (table.weights != 0)
    weighed = [name for name, is_used in zip(table.names, applies, strict=True) if is_used]
    placed = [name for name in weighed if name in table.score_map]
    if not placed:
        return "no term says which places earned its score: tokens get their image's advantage"
    share = 100 * placed_share(table, mode=mode)
    found = f"by place for {', '.join(placed)}, {share:z.0f} % of the variance within groups"
    whole = [name for name in weighed if name not in table.score_map]
    return found + (f"; of the whole image for {', '.join(whole)}" if whole else "")


def hint_at_boxes(table: RewardTable) -> list[str]:
    """Hint on terms whose credit by place needs a layout that the prompt fixes."""
    boxed = [
        name
        for name, weight in zip(table.names, table.weights.tolist(), strict=True)
        if weight
        and any(
            not box.kind and box.value
            for group in table.score_boxes.get(name, ())
            for boxes in group
            for box in boxes
        )
    ]
    if not boxed:
        return []
    return [
        f"boxes of {', '.join(boxed)} are compared with the same places of the group's other "
        "images, which suits layouts that the prompt fixes; where things may stand anywhere, it "
        "teaches the policy to draw more of them: give each ScoreBox a kind, or set "
        "advantage.credit=image"
    ]


def _evaluate_one(models: Models, prepared: PreparedRun) -> Evaluation:
    """Evaluate the first held-out prompt; evaluations score differently from training."""
    config = prepared.config
    batches = evaluation_batches(
        prepared.prompts.held_out,
        range(1),
        prompts_per_batch=1,
        samples_per_prompt=config.eval.samples_per_prompt,
        seed=config.eval.seed,
    )
    part = evaluate(models, batches, step=0)
    return weigh_evaluation([part], mode=config.reward.combine, base_scores=None)


def _describe_means(table: RewardTable) -> str:
    """Mean score of each term over the images that it scored."""
    scores = [
        (name, table.raw[table.is_applicable[:, column], :, column])
        for column, name in enumerate(table.names)
    ]
    return ", ".join(
        f"{name} {found.nanmean().item():z.3f}" if len(found) else f"{name} does not apply"
        for name, found in scores
    )


def _described_processes(config: Config) -> str:
    """Describe how many processes can run the config; never refuses it, because one always can."""
    try:
        refuse_for_processes(config, UNDIVIDED)
    except ConfigError as error:
        return f"glm-grpo train refuses a single one: {error}"
    is_asynchronous = config.train.mode == "async"
    return "1" if is_asynchronous else f"1 to {config.rollout.prompts_per_step}"
