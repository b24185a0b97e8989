"""Runs every term over a batch of pictures and refuses whatever is not a score."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Bool, Float32, UInt8
from torch import Tensor, nn

from rewards.base import Reward
from rewards.ocr import OcrReward
from rewards.types import Prompt, RewardError, RewardTable


class Scorer:
    """The terms of a reward with their weights.

    Args:
        terms: In the order of the R axis, names unique.
        weights: One finite number per term.

    Raises:
        ValueError: No terms, terms and weights of different number, or two terms of one name.
    """

    def __init__(self, terms: Sequence[Reward], weights: Sequence[float]) -> None:
        names = [term.name for term in terms]
        if not terms or len(terms) != len(weights) or len(set(names)) != len(names):
            raise ValueError(
                f"terms {names} with weights {list(weights)}: needs at least one term, one weight "
                "for each, and no name twice"
            )
        self._terms = tuple(terms)
        self._weights = tuple(weights)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the terms, the order of the R axis."""
        return tuple(term.name for term in self._terms)

    def modules(self) -> tuple[nn.Module, ...]:
        """Networks of all terms, for whoever moves them between devices."""
        return tuple(module for term in self._terms for module in term.modules())

    def check_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Refuse prompts that no term can score, before anything is sampled.

        Raises:
            RewardError: No term with a weight other than 0 applies to a prompt.
        """
        weighed = [
            term for term, weight in zip(self._terms, self._weights, strict=True) if weight != 0
        ]
        for prompt in prompts:
            if not any(term.applies_to(prompt) for term in weighed):
                raise RewardError(
                    f"prompt {prompt.prompt_id} ({prompt.prompt!r}) cannot be rewarded: none of "
                    f"the terms with a weight ({', '.join(term.name for term in weighed)}) applies "
                    "to it. Give it a target picture (lpips, ssim) or a text in quotation marks "
                    "(ocr), remove it, or add a term that applies to every prompt (aesthetic)"
                )

    def score(self, prompts: Sequence[Prompt], pixels: UInt8[Tensor, "P G 3 H W"]) -> RewardTable:
        """Score every picture by every term that applies to its prompt.

        Each term sees one prompt's group at a time: that bounds memory, and a group is large
        enough to keep an accelerator busy.

        Args:
            prompts: The P prompts.
            pixels: RGB, 0..255, G pictures per prompt, on any device.

        Returns:
            The table of raw scores, on the CPU.

        Raises:
            RewardError: A term raised, or returned something other than one finite float32 number
                per picture. Names term, prompt and image.
            ValueError: The numbers of prompts and of groups differ.
        """
        if len(prompts) != pixels.shape[0]:
            raise ValueError(
                f"{len(prompts)} prompts for {pixels.shape[0]} groups of pictures; "
                "there must be one prompt for each group"
            )
        is_applicable = self._find_applicable(prompts)
        raw = torch.zeros(*pixels.shape[:2], len(self._terms))
        for row, prompt in enumerate(prompts):
            for column, term in enumerate(self._terms):
                if is_applicable[row, column]:
                    raw[row, :, column] = _score_group(term, prompt, pixels[row])
        return RewardTable(
            self.names, raw, is_applicable, torch.tensor(self._weights, dtype=torch.float32)
        )

    def recognise(self, pixels: UInt8[Tensor, "P G 3 H W"]) -> tuple[tuple[str, ...], ...] | None:
        """The text that the OCR term reads in every picture; None without such a term."""
        for term in self._terms:
            if isinstance(term, OcrReward):
                return tuple(tuple(term.read(group)) for group in pixels)
        return None

    def _find_applicable(self, prompts: Sequence[Prompt]) -> Bool[Tensor, "P R"]:
        rows = [[term.applies_to(prompt) for term in self._terms] for prompt in prompts]
        return torch.tensor(rows, dtype=torch.bool)


def _score_group(
    term: Reward, prompt: Prompt, pixels: UInt8[Tensor, "G 3 H W"]
) -> Float32[Tensor, " G"]:
    group_size = pixels.shape[0]
    try:
        scores = term.score([prompt] * group_size, pixels)
    # Terms wrap libraries that raise whatever they like, and each such failure ends the step.
    except Exception as error:
        image = _find_failing_image(term, prompt, pixels)
        raise RewardError(
            f"term {term.name}, prompt {prompt.prompt_id}, {image}: scoring failed with "
            f"{type(error).__name__}: {error}. A failure is never counted as a score; remove the "
            f"cause, or the term {term.name} from reward.terms"
        ) from error
    if (scores.shape, scores.dtype) != ((group_size,), torch.float32):
        raise RewardError(
            f"term {term.name}, prompt {prompt.prompt_id}, images 0 to {group_size - 1}: returned "
            f"{scores.dtype} of shape {tuple(scores.shape)}; a term must return torch.float32 of "
            f"shape ({group_size},), one number per picture"
        )
    scores = scores.cpu()
    for image_index in (~torch.isfinite(scores)).nonzero().flatten().tolist():
        raise RewardError(
            f"term {term.name}, prompt {prompt.prompt_id}, image {image_index}: returned "
            f"{scores[image_index].item()}; a score must be a finite number. A term that cannot "
            "score must raise"
        )
    return scores


def _find_failing_image(term: Reward, prompt: Prompt, pixels: UInt8[Tensor, "G 3 H W"]) -> str:
    # A term that scores a group in one go cannot say which picture it stumbled over.
    for index in range(pixels.shape[0]):
        try:
            term.score([prompt], pixels[index : index + 1])
        except Exception:  # as above; the first failure is the one that is reported
            return f"image {index}"
    return f"images 0 to {pixels.shape[0] - 1} together (each alone can be scored)"
