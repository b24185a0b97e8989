"""Describe what figures of an evaluation depend on: model, sampler, seeds, and what judged."""

from __future__ import annotations

from glm_grpo.config import Config
from glm_grpo.models.export_page import describe_decoding, describe_sampling
from glm_grpo.output import counted, without_folders
from glm_grpo.run.provenance import Provenance

_PACKAGES = ("glm-grpo", "torch", "transformers", "diffusers")
_DIGITS = 12
"""Hexadecimal digits shown of a digest."""


def describe_conditions(config: Config, provenance: Provenance | None) -> dict[str, str]:
    """Describe how held-out images were made and judged, by the name of each condition.

    Args:
        provenance: Gives versions and digests; None: not known.
    """
    rollout, evaluation = config.rollout, config.eval
    prompts = without_folders(config.data.eval_path)
    if provenance is not None:
        prompts += f", {counted(len(provenance.held_out), 'prompt')}"
    decoding = describe_decoding(config.decode)
    if config.decode.quantization is not None:
        decoding += f", weights in 8 bits ({config.decode.quantization})"
    weights: str = config.model.dtype
    if config.model.quantization is not None:
        weights += f", weights in 4 bits ({config.model.quantization})"
    images = f"{counted(evaluation.samples_per_prompt, 'image')} per prompt"
    size = f"{rollout.height} x {rollout.width} pixels (height x width)"
    found = {
        "model": f"{without_folders(config.model.path)}, {weights}",
        "prompts": prompts,
        "images": f"{images}, {size}",
        "seed": str(evaluation.seed),
        "sampling": describe_sampling(rollout),
        "decoding": decoding,
        **describe_judges(config, provenance),
    }
    versions = {} if provenance is None else provenance.versions
    shown = [f"{name} {versions[name]}" for name in _PACKAGES if name in versions]
    return found | ({"versions": ", ".join(shown)} if shown else {})


def describe_judges(config: Config, provenance: Provenance | None) -> dict[str, str]:
    """Describe the detector, OCR engine or function of each term that has one, by `term NAME`."""
    versions = {} if provenance is None else provenance.versions
    found = {}
    for name, term in config.reward.terms.items():
        judges = [
            without_folders(judge)
            + (f" ({package} {versions[package]})" if package in versions else "")
            for judge, package in term.judges().items()
        ]
        if judges:
            found[f"term {name}"] = ", ".join([*judges, *_digests(name, provenance)])
    return found


def _digests(term: str, provenance: Provenance | None) -> list[str]:
    """Digests of the user's code, and of the files, that a term reads."""
    if provenance is None:
        return []
    key = f"reward.terms.{term}."
    return [
        f"{kind} of {place.removeprefix(key)} {digest[:_DIGITS]}"
        for kind, digests in (("code", provenance.code), ("files", provenance.files))
        for place, digest in digests.items()
        if place.startswith(key)
    ]
