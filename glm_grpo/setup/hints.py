"""Hints on settings and prompts that are valid, but probably not as intended."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import torch

from glm_grpo.config import Config
from glm_grpo.data.files import shorten
from glm_grpo.data.prompts import PromptSource, shared_rows
from glm_grpo.models.base import TextRule
from glm_grpo.models.planning import Planner
from glm_grpo.output import counted, printable
from glm_grpo.plan.devices import without_bfloat16
from glm_grpo.setup.prompts import Prompts
from glm_grpo.setup.rewards import ASKING, ASKING_FOR_OBJECTS
from glm_grpo.tiny.embedded import EMBEDDED
from rewards.terms.composition_rows import published_tag, read_composition
from rewards.texts import find_quoted_texts

_MOST_NAMED = 3
"""Largest number of prompts that a hint names."""
_BYTES_PER_TOKEN = 4
"""About as many as a token has in English or Chinese."""
_FAR = 4
"""How many times as long as usual a prompt is far longer."""


def hint_at_bfloat16(config: Config, device: torch.device) -> list[str]:
    """Hint at a dtype that the device of a run only emulates."""
    if device.type != "cuda" or config.model.dtype != "bfloat16":
        return []
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return []
    name, is_denoising = torch.cuda.get_device_name(device), config.decode.steps is not None
    return [without_bfloat16(name, is_denoising=is_denoising)]


def hint_at_credit(config: Config) -> list[str]:
    """Hints on credit by place that has no effect."""
    is_placed = any(
        term.has_score_map() and term.weight != 0 for term in config.reward.terms.values()
    )
    if config.advantage.credit == "image" or is_placed:
        return []
    return [
        "advantage.credit = place: no term with a weight says which places earned its score, so "
        "every token gets its image's advantage, as with advantage.credit=image"
    ]


def hint_at_prompts(config: Config, prompts: Prompts, text_rule: TextRule | None) -> list[str]:
    """Hints on prompts and weights.

    Args:
        text_rule: How the model finds texts in a prompt; None if it reads a prompt as a whole.
    """
    lines = [
        f"reward.terms.{name}.weight = {weight:g}: low scores of {name} are rewarded"
        for name, weight in config.reward.weights().items()
        if weight < 0
    ]
    for of, prompt_set in prompts.named():
        lines += hint_at_unknown(config, of, prompt_set)
    if text_rule is not None:
        lines += [
            line for of, each in prompts.named() for line in _hint_at_quoting(text_rule, of, each)
        ]
    rows = shared_rows(prompts.held_out, prompts.training)
    if rows:
        lines.append(
            f"{len(rows)} of {counted(len(prompts.held_out), 'held-out prompt')} "
            f"{'is' if len(rows) == 1 else 'are'} also trained on: "
            f"{_name_some(prompts.held_out, rows)}"
        )
    return lines


def hint_at_unknown(config: Config, of: str, prompt_set: PromptSource) -> list[str]:
    """Hint at prompts that a miniature was not trained on; empty for other models.

    Args:
        of: What the prompts are for: `training` or `held-out`.
    """
    embedded, is_edit = EMBEDDED.get(config.model.path), config.data.sources > 0
    if embedded is None:
        return []
    captions = enumerate(prompt_set.captions())
    rows = [row for row, each in captions if not embedded.is_known(each, is_edit=is_edit)]
    if not rows:
        return []
    return [
        f"{len(rows)} of {counted(len(prompt_set), f'{of} prompt')} "
        f"{'is' if len(rows) == 1 else 'are'} not of the form "
        f"{embedded.known_form(is_edit=is_edit)} that the embedded model knows: "
        f"{_name_some(prompt_set, rows)}"
    ]


def hint_at_tags(prompts: Prompts) -> list[str]:
    """Hints on tags that are probably meant to be those of GenEval, by which scores are shown."""
    lines = []
    for of, prompt_set in prompts.named():
        read = map(read_composition, prompt_set.metadata())
        rows = {
            row: f"({each.tag}: did you mean {meant}?)"
            for row, each in enumerate(read)
            if each is not None and (meant := published_tag(each.tag)) is not None
        }
        if rows:
            lines.append(
                f"the tag of {len(rows)} of {counted(len(prompt_set), f'{of} prompt')} is nearly "
                f"one of GenEval's: {_name_some(prompt_set, rows)}"
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


def _hint_at_quoting(rule: TextRule, of: str, prompt_set: PromptSource) -> list[str]:
    """Hint on prompts whose quoted texts differ from those that the model finds."""
    differing = {}
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


def list_asked(config: Config, prompts: Prompts) -> list[str]:
    """Lines on the texts and objects that the reward asks for; none on what no term looks for."""
    of_texts, of_objects = (
        [name for name, term in config.reward.terms.items() if need in term.needs()]
        for need in ("text", "objects")
    )
    lines = []
    for of, prompt_set in prompts.named():
        if of_texts:
            texts = {row: _list_some(each) for row, each in enumerate(prompt_set.texts()) if each}
            lines.append(_list_those(texts, "a text", ASKING, of, prompt_set))
            lines += _list_without_text(texts, of_texts, of, prompt_set)
        if of_objects:
            read = map(read_composition, prompt_set.metadata())
            objects = {
                row: f"({' and '.join(each.describe())})" for row, each in enumerate(read) if each
            }
            lines.append(_list_those(objects, "objects", ASKING_FOR_OBJECTS, of, prompt_set))
    return lines


def _list_those(
    asked: Mapping[int, str], what: str, asking: str, of: str, prompt_set: PromptSource
) -> str:
    named = f": {_name_some(prompt_set, asked)}" if asked else f"; a prompt {asking}"
    ask = "asks" if len(asked) == 1 else "ask"
    return f"{len(asked)} of {counted(len(prompt_set), f'{of} prompt')} {ask} for {what}{named}"


def _list_without_text(
    asked: Mapping[int, str], terms: Sequence[str], of: str, prompt_set: PromptSource
) -> list[str]:
    rows = [row for row in range(len(prompt_set)) if row not in asked]
    if not (asked and rows):
        return []
    ask, them = ("asks", "it") if len(rows) == 1 else ("ask", "them")
    do = "does" if len(terms) == 1 else "do"
    return [
        f"{len(rows)} of {counted(len(prompt_set), f'{of} prompt')} {ask} for no text "
        f"({_name_some(prompt_set, rows)}): {' and '.join(terms)} {do} not score {them}"
    ]


def _name_some(prompt_set: PromptSource, rows: Iterable[int] | Mapping[int, str]) -> str:
    """Ids of the first prompts, with a remark on each."""
    said = rows if isinstance(rows, Mapping) else dict.fromkeys(rows, "")
    # Accessing a prompt loads its images.
    named = [
        printable(f"{prompt_set[row].prompt_id} {text}".rstrip())
        for row, text in islice(said.items(), _MOST_NAMED)
    ]
    return ", ".join([*named, *(["..."] if len(said) > _MOST_NAMED else [])])


def _list_some(texts: Sequence[str]) -> str:
    """The first texts, each shortened."""
    shown = [*map(shorten, texts[:_MOST_NAMED]), *(["..."] if len(texts) > _MOST_NAMED else [])]
    return " and ".join(shown) or "nothing"
