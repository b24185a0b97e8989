"""Check a run before it starts, cheapest checks first.

Both the start of a run and `glm-grpo check` use these checks. What a type or a schema can refuse
was refused earlier, when the config was validated.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice

import torch

from glm_grpo.builders.family import family_of
from glm_grpo.builders.models import (
    begin_with,
    find_planner,
    find_start,
    hint_at_size,
    load_models,
)
from glm_grpo.builders.prompts import (
    Prompts,
    build_prompts,
    check_model,
)
from glm_grpo.collectors.ray_cluster import require_ray
from glm_grpo.config import TINY, Config, effective_config
from glm_grpo.config.losses import CustomLoss
from glm_grpo.data.files import shorten
from glm_grpo.data.prompts import (
    PromptSource,
    shared_rows,
)
from glm_grpo.errors import ConfigError, Errors
from glm_grpo.models.base import ReservedTokens
from glm_grpo.models.family import ModelFamily
from glm_grpo.models.planning import UNDIVIDED, Parallelism, Planner
from glm_grpo.output import counted, printable
from glm_grpo.plan.fit import check_fit
from glm_grpo.run.trackers import check_trackers
from glm_grpo.tiny.prompts import is_known, known_form
from glm_grpo.training.distributed.processes import ALONE, Processes
from glm_grpo.training.phase import Models
from rewards.problems import Problem, describe_problems
from rewards.texts import find_quoted_texts
from rewards.types import Prompt, RewardError

_MOST_NAMED = 3
"""Largest number of prompts that a hint names."""
_BYTES_PER_TOKEN = 4
"""About as many as a token has in English or Chinese."""
_FAR = 4
"""How many times as long as usual a prompt is far longer."""
_ASKING = "asks for a text in quotation marks, or by the field `text`"


@dataclass(frozen=True)
class Checked:
    """A config that can start, before its models are loaded.

    Attributes:
        config: Config whose memory and speed keys have values that work.
        note: Line about adjusted keys; empty if all work as given.
        prompts: All prompts, checked.
        planner: Planner of the model; None if its sizes are unknown.
        memory: Description of the memory needed and available.
        hints: Hints on sizes and prompts that are probably wrong.
        texts: Lines on the texts that the prompts ask for.
    """

    config: Config
    note: str
    prompts: Prompts
    planner: Planner | None
    memory: str
    hints: list[str]
    texts: list[str]


def check_before_loading(
    config: Config,
    device: torch.device,
    *,
    parallelism: Parallelism = UNDIVIDED,
    processes: Processes = ALONE,
) -> Checked:
    """Check what needs no model, and leave nothing behind.

    Args:
        parallelism: How the run is distributed.

    Raises:
        GlmGrpoError: A check failed; those of model, prompts and terms are reported together.
        PeerError: A check failed in another process.
    """
    check_trackers(config.trackers)
    if config.train.mode == "async":
        require_ray()
    effective = effective_config(
        config, processes=parallelism.count, is_sharded=parallelism.is_sharded
    )
    config = effective.config
    if config.train.resume is None:
        find_start(config)
    with processes.together():
        prompts = check_parts(config)
        sources = (prompts.training, prompts.held_out)
        planner = find_planner(config.model.path)
        memory = check_fit(config, planner, sources, device, parallelism)
    return Checked(
        config=config,
        note=effective.note,
        prompts=prompts,
        planner=planner,
        memory=memory,
        hints=[
            *hint_at_size(config),
            *hint_at_credit(config),
            *hint_at_prompts(config, prompts),
            *hint_at_length(prompts, planner),
        ],
        texts=list_texts(config, prompts),
    )


def check_parts(config: Config) -> Prompts:
    """Check model, prompts and terms, none of which needs another.

    Raises:
        GlmGrpoError: Checks failed; several are reported together.
    """
    errors, reserved = Errors(), ReservedTokens()
    with errors.collecting():
        reserved = check_model(config)
    with errors.collecting():
        prompts = build_prompts(config, reserved)
        check_used(config, prompts)
        check_targets(config, prompts)
    for term in config.reward.terms.values():
        with errors.collecting():
            try:
                term.check()
            except RewardError as error:
                raise ConfigError(str(error)) from error
    errors.raise_all()
    return prompts


def load_checked(
    config: Config,
    prompts: Prompts,
    device: torch.device,
    *,
    is_sharded: bool = False,
    is_beginning: bool = True,
) -> tuple[Models, list[str]]:
    """Load the models, and check that they can work with the prompts.

    Args:
        config: `Checked.config`.
        prompts: `Checked.prompts`.
        is_sharded: Whether the engine places the policy's weights in shards.
        is_beginning: Whether to load the weights that `model.start_from` names; a resumed run has
            its own.

    Returns:
        The models, and lines on terms that apply to few prompts.

    Raises:
        GlmGrpoError, RewardError: Loading failed, or a prompt cannot be rewarded.
    """
    models = load_models(
        config, device, needs_reference=config.needs_reference, is_sharded=is_sharded
    )
    if is_beginning:
        begin_with(models, find_start(config))
    return models, check_prompt_sets(config, models, prompts)


def hint_at_credit(config: Config) -> list[str]:
    """Hints on credit by place that has, or may have, no effect."""
    if config.advantage.credit == "image":
        return []
    lines = []
    if all(term.parts == "never" or term.weight == 0 for term in config.reward.terms.values()):
        lines.append(
            "advantage.credit = place: no term with a weight says which places earned its score, "
            "so every token gets its image's advantage, as with advantage.credit=image"
        )
    if isinstance(config.loss, CustomLoss):
        lines.append(
            f"advantage.credit = place: {config.loss.function} must weigh tokens by "
            "inputs.weighing_advantages; inputs.advantages are those of whole images"
        )
    return lines


def hint_at_prompts(config: Config, prompts: Prompts) -> list[str]:
    """Hints on prompts and weights that are valid but probably not as intended; needs no model."""
    lines = [
        f"reward.terms.{name}.weight = {weight:g}: low scores of {name} are rewarded"
        for name, weight in config.reward.weights().items()
        if weight < 0
    ]
    if config.model.path == TINY:
        is_edit = config.data.sources > 0
        for of, prompt_set in prompts.named():
            rows = [
                row
                for row, caption in enumerate(prompt_set.captions())
                if not is_known(caption, is_edit=is_edit)
            ]
            if rows:
                lines.append(
                    f"{len(rows)} of {counted(len(prompt_set), f'{of} prompt')} "
                    f"{'is' if len(rows) == 1 else 'are'} not of the form "
                    f"{known_form(is_edit=is_edit)} that the embedded model knows: "
                    f"{_name_some(prompt_set, rows)}"
                )
    family = family_of(config.model.path)
    lines += [line for of, each in prompts.named() for line in _hint_at_quoting(family, of, each)]
    rows = shared_rows(prompts.held_out, prompts.training)
    if rows:
        lines.append(
            f"{len(rows)} of {counted(len(prompts.held_out), 'held-out prompt')} "
            f"{'is' if len(rows) == 1 else 'are'} also trained on: "
            f"{_name_some(prompts.held_out, rows)}"
        )
    return lines


def hint_at_length(prompts: Prompts, planner: Planner | None) -> list[str]:
    """Hints on prompts that are far longer than usual, or long and far longer than the others."""
    if planner is None:
        return []
    lines = []
    usual = planner.usual_prompt_tokens * _BYTES_PER_TOKEN
    for of, prompt_set in prompts.named():
        sizes = [len(caption.encode()) for caption in prompt_set.captions()]
        median = statistics.median(sizes)
        longest = max(usual, min(_FAR * usual, _FAR * median))
        rows = {row: f"({size:,} bytes)" for row, size in enumerate(sizes) if size > longest}
        if rows:
            verb = "is" if len(rows) == 1 else "are"
            lines.append(
                f"{len(rows)} of {len(prompt_set)} {of} prompts {verb} far longer than usual "
                f"({usual:,} bytes; the median is {median:,.0f}): {_name_some(prompt_set, rows)}; "
                "the longest prompt of a batch determines its time and memory: shorten or remove it"
            )
    return lines


def _hint_at_quoting(family: ModelFamily, of: str, prompt_set: PromptSource) -> list[str]:
    """Hint on prompts whose quoted texts differ from those that the model finds."""
    rule, differing = family.TEXT_RULE, {}
    if rule is None:
        return []
    for row, caption in enumerate(prompt_set.captions()):
        quoted = sorted(find_quoted_texts(caption))
        # Models read a repeated text again.
        read = sorted({text.strip() for text in rule.find(caption) if text.strip()})
        if read != quoted:
            differing[row] = f"{_list_some(read)} for {_list_some(quoted)}"
    if not differing:
        return []
    return [
        f"in {len(differing)} of {counted(len(prompt_set), f'{of} prompt')} the model reads other "
        f"texts than the quoted ones: {_name_some(prompt_set, differing)}; {rule.advice}"
    ]


def list_texts(config: Config, prompts: Prompts) -> list[str]:
    """Lines on the texts that the reward asks for; empty if no term reads them."""
    if not any("text" in term.needs() for term in config.reward.terms.values()):
        return []
    lines = []
    for of, prompt_set in prompts.named():
        asked = {row: _list_some(each) for row, each in enumerate(prompt_set.texts()) if each}
        named = f": {_name_some(prompt_set, asked)}" if asked else f"; a prompt {_ASKING}"
        ask = "asks" if len(asked) == 1 else "ask"
        all_prompts = counted(len(prompt_set), f"{of} prompt")
        lines.append(f"{len(asked)} of {all_prompts} {ask} for a text{named}")
    return lines


def check_used(config: Config, prompts: Prompts) -> None:
    """Refuse terms with a weight that apply to no training prompt, as far as the config tells.

    Their weight would go to the others. A run that began so may be resumed.

    Raises:
        ConfigError: There are such terms; the message says what the prompts lack.
    """
    reward, training = config.reward, prompts.training
    if config.train.method == "sft" or config.train.resume is not None:
        return
    ids, texts = training.ids(), training.texts()
    lacks_target, lacks_source = not training.has_targets(), config.data.sources == 0
    unused: dict[str, list[str]] = {}
    weights = {name: abs(weight) for name, weight in reward.weights().items() if weight != 0}
    for name in weights:
        needs, only = reward.terms[name].needs(), reward.terms[name].only
        rows = [row for row, prompt_id in enumerate(ids) if fnmatchcase(prompt_id, only)]
        for is_lacking, lack in (
            (not rows, f"has an id that matches `only`, {only!r}"),
            ("target" in needs and lacks_target, "has a target image, by the field `target`"),
            ("source" in needs and lacks_source, "has a source image, because data.sources is 0"),
            ("text" in needs and not any(texts[row] for row in rows), _ASKING),
        ):
            if is_lacking:
                unused.setdefault(lack, []).append(name)
                break
    if not unused:
        return
    names = [name for each in unused.values() for name in each]
    share = sum(weights[name] for name in names) / sum(weights.values())
    lacks = "; ".join(f"{' and '.join(each)}: none {lack}" for lack, each in unused.items())
    remedy = " ".join(f"{name}=null" for name in names)
    if not reward.allow_untied and not any(
        reward.terms[name].needs() for name in weights if name not in names
    ):
        clip = "clip_score" if "clip_score" in reward.terms else "+reward.terms.clip_score.weight"
        remedy += f" and add a term that applies to every prompt ({clip}=0.5)"
    raise ConfigError(
        f"reward.terms: {share:.0%} of the weight applies to none of the {len(training)} training "
        f"prompts ({lacks}), and would go to the other terms. Give the prompts what they lack, or "
        f"leave these terms out: {remedy}"
    )


def check_prompt_sets(config: Config, models: Models, prompts: Prompts) -> list[str]:
    """Refuse prompts that no term can score; returns lines on terms that apply to few prompts.

    Raises:
        RewardError: See `Scorer.check_prompts`.
    """
    lines = []
    for of, prompt_set in prompts.named():
        is_training = prompt_set is prompts.training
        # The training prompts of a supervised run are not scored.
        if not (is_training and config.train.method == "sft"):
            lines += models.scorer.check_prompts(
                _each(prompt_set), of=f"{of} prompts", is_training=is_training
            )
    if config.rollout.refill_rounds and len(prompts.training) == config.rollout.prompts_per_step:
        lines.append(
            f"rollout.refill_rounds: every step samples all {len(prompts.training)} training "
            "prompts, so none is left to replace one; add prompts or lower rollout.prompts_per_step"
        )
    return lines


def _each(prompt_set: PromptSource) -> Iterator[Prompt]:
    return (prompt_set[index] for index in range(len(prompt_set)))


def check_targets(config: Config, prompts: Prompts) -> None:
    """Refuse to learn from target images where no training prompt has one.

    Raises:
        ConfigError: No training prompt has one.
    """
    if not config.reads_targets or prompts.training.has_targets():
        return
    key, value, remedy = (
        ("train.method", "sft", "set train.method=grpo")
        if config.train.method == "sft"
        else (
            "anchor.weight",
            config.anchor.weight,
            "set anchor.weight=0 and leave anchor.final_weight out",
        )
    )
    rule = f"none of the {len(prompts.training)} training prompts has a target image to learn from"
    problem = Problem(key, value, rule, f"give the prompts targets, or {remedy}")
    raise ConfigError(describe_problems([problem]))


def _name_some(prompt_set: PromptSource, rows: Iterable[int] | Mapping[int, str]) -> str:
    """Ids of the first prompts, with a remark on each."""
    said = rows if isinstance(rows, Mapping) else dict.fromkeys(rows, "")
    # Accessing a prompt loads its pictures.
    named = [
        printable(f"{prompt_set[row].prompt_id} {text}".rstrip())
        for row, text in islice(said.items(), _MOST_NAMED)
    ]
    return ", ".join([*named, *(["..."] if len(said) > _MOST_NAMED else [])])


def _list_some(texts: Sequence[str]) -> str:
    """The first texts, each shortened."""
    shown = [*map(shorten, texts[:_MOST_NAMED]), *(["..."] if len(texts) > _MOST_NAMED else [])]
    return " and ".join(shown) or "nothing"
