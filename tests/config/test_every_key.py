"""Every key can be set, survives being stored, and is compared when a run resumes."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from glm_grpo.config import config_differences, flatten, validate_config
from glm_grpo.config.root import Config
from rewards.base import TermConfig
from rewards.problems import known_keys
from rewards.terms import KINDS
from tests.config.conftest import set_keys
from tests.factories import REQUIRED_OPTIONS

OTHER: dict[str, object] = flatten(
    yaml.safe_load("""
model: {path: zai-org/GLM-Image, dtype: bfloat16,
        adapter: {rank: 16384, alpha: 1.0e-6, target_modules: [q_proj]},
        start_from: outputs/run, gradient_checkpointing: true, quantization: nf4,
        compile: false}
data: {path: prompts.jsonl, eval_path: held_out.jsonl, sources: 1}
rollout: {prompts_per_step: 1, group_size: 2, batch_size: 16, dynamic_sampling_rounds: 3,
          height: 1024, width: 32, temperature: 0.001, top_p: 1.0, top_k: 1, min_p: 0.02,
          guidance_scale: 5.0}
decode: {steps: 1, guidance_scale: 1.5, rollout_steps: 4, recheck_every: 1, recheck_groups: 1,
         min_rank_correlation: -1.0, batch_size: 1, vae_batch_size: 2, quantization: float8,
         compile: false}
reward:
  combine: normalize_then_sum
  allow_image_only: true
  overlap: false
  watch: [psnr]
  on_hacking: stop
  canary_margin: 3.0
  terms:
    ssim: {weight: -0.5, std_floor: 0.01, timeout_seconds: 5.0, prompt_ids: poster-*,
           when: evaluation, against: source}
    lpips: {against: source, network: vgg, pretrained: true}
    ocr: {case_sensitive: true, extra_text_penalty: 1.0, engine: rapidocr, threads: 1,
          detection_side: 512, languages: [en, de]}
    aesthetic: {clip_model: ViT-B-32, clip_weights: clip.pt, head: head.pth}
    psnr: {against: source}
    clip_score: {clip_model: ViT-B-32, clip_weights: clip.pt}
    clip_image: {against: source, clip_model: ViT-B-32, clip_weights: clip.pt}
    pick_score: {model: pick, processor: clip}
    hps: {clip_model: ViT-L-14, checkpoint: hps.pt}
    composition: {detector: 'find.py:detect', folder: /mine, score: verdict, threshold: 0.15,
                  counting_threshold: 0.5, position_margin: 0.0, max_objects: 1,
                  clip_model: ViT-B-32, clip_weights: null, images_at_once: 1,
                  test_image: dog.png, test_class: dog}
    vlm_judge: {url: 'https://judge.example/v1', model: another, lowest: 1, highest: 5,
                question: 'Is this {prompt}? From {lowest} to {highest}.',
                questions: vqa_list, read: probability, pattern: 'Score: (.+)',
                api_key_variable: JUDGE_KEY, request_timeout_seconds: 5.0, retries: 0,
                requests_at_once: 1}
    remote: {url: 'https://scores.example', token_variable: SCORES_TOKEN,
             needs_of_prompt: [target], retries: 0}
    custom: {function: 'scores:contrast', folder: /mine, needs_of_prompt: []}
advantage: {normalization: batch_std, std_floor: 0.5, clip: null, credit: image, reward_to_go: 0.6}
loss: {kl_coef: 0.0, kl_estimator: k3, kl_placement: reward, kl_behaviour_coef: 0.1,
       reference_sync_steps: 5, reference_mixup_alpha: 1.0, entropy_coef: 0.01,
       top_entropy_quantile: 1.0, kind: cispo, clip_low: 0.1, clip_high: 0.28, max_ratio: 4.0,
       two_sided_clip: 4.0, ratio_level: sequence, tau_positive: 2.0, tau_negative: 2.0,
       log_clip: 0.1,
       function: 'mine:other', folder: /mine, importance_weights: none,
       max_importance_ratio: 1.0, min_importance_ratio: 0.5}
sft: {weight: 0.1, final_weight: 0.2, preview: encode}
optim: {learning_rate: 10.0, schedule: constant, warmup_steps: 0, weight_decay: 0.1,
        betas: [0.0, 0.999], epsilon: 1.0e-15, max_grad_norm: 0.1}
train: {mode: async, method: sft, steps: 500, seed: 9223372036854775807, epochs_per_rollout: 2,
        minibatches: 8, skip_zero_std: true, micro_batch_size: 1, checkpoint_every: 1,
        keep_checkpoints: 1, eval_every: 1, resume: auto, resume_with_changes: true}
async: {collectors: 1, max_policy_age: 0, push_every: 2, address: 'head:6379',
        cpus_per_collector: 4, gpus_per_collector: 0.25}
eval: {samples_per_prompt: 1, seed: 0, ema_decay: 0.9, group_by: category}
offload: modules
run: {name: larger groups, notes: "two\\nlines", tags: [ocr, first]}
trackers: []
run_dir: elsewhere
""")
)
"""For every key a value that `configs/tiny.yaml` does not have, many of them at a bound."""

MAY_CHANGE = (
    *("run_dir", "run.", "trackers", "offload"),
    *("model.gradient_checkpointing", "model.compile", "rollout.batch_size"),
    *(f"decode.{name}" for name in ("recheck_every", "recheck_groups", "min_rank_correlation")),
    *(f"decode.{name}" for name in ("batch_size", "vae_batch_size", "compile")),
    *(f"reward.{name}" for name in ("allow_image_only", "overlap", "watch", "canary_margin")),
    *("reward.on_hacking", "reward.terms.ssim.timeout_seconds", "reward.terms.ocr.threads"),
    *("reward.terms.vlm_judge.url", "reward.terms.vlm_judge.api_key_variable"),
    *("reward.terms.vlm_judge.request", "reward.terms.vlm_judge.retries"),
    *(f"reward.terms.composition.{name}" for name in ("folder", "images_at_once", "test_")),
    *("reward.terms.remote.url", "reward.terms.remote.token_variable"),
    *("reward.terms.remote.retries", "reward.terms.custom.folder", "loss.folder"),
    *("train.micro_batch_size", "train.skip_zero_std", "train.checkpoint_every"),
    *("train.keep_checkpoints", "train.eval_every", "train.resume"),
    "eval.group_by",
    *("async.collectors", "async.address", "async.cpus_per", "async.gpus_per"),
)
"""Keys of memory, speed, records and addresses, or their beginnings; others make another run."""

ADAPTER = {"rank": 4, "alpha": 8.0}
KL = {"kl_coef": 0.02, "kl_estimator": None, "kl_placement": "loss", "kl_behaviour_coef": 0.0}
CUSTOM = {"loss": {"kind": "custom", "function": "mine:loss", **KL}}
CISPO = {"loss": {"kind": "cispo", **KL}}
SAPO = {"loss": {"kind": "sapo", **KL}}
EASYOCR = {"reward.terms.ocr": {"kind": "ocr", "engine": "easyocr", "weight": 0.3}}

WITH_TEST = {
    "reward.terms.composition": {
        "kind": "composition",
        "weight": 0.1,
        "test_image": "cat.png",
        "test_class": "cat",
    }
}


def judge(**options: object) -> dict[str, object]:
    section = {"kind": "vlm_judge", "weight": 0.1, **REQUIRED_OPTIONS["vlm_judge"], **options}
    return {"reward.terms.vlm_judge": section}


BESIDE: dict[str, dict[str, object]] = {
    "model.adapter.rank": {"model.adapter": ADAPTER},
    "model.adapter.alpha": {"model.adapter": ADAPTER},
    "model.adapter.target_modules": {"model.adapter": ADAPTER},
    "model.quantization": {"model.adapter": ADAPTER},
    "reward.watch": {"reward.terms.psnr": {"weight": 0.0}},
    "reward.terms.ssim.when": {"reward.terms.ssim.weight": 0.0},
    "reward.terms.ocr.engine": EASYOCR,
    "reward.terms.ocr.languages": EASYOCR,
    "reward.terms.composition.test_image": WITH_TEST,
    "reward.terms.composition.test_class": WITH_TEST,
    "reward.terms.vlm_judge.questions": judge(question="{question}", questions="others"),
    "reward.terms.vlm_judge.read": judge(question="{prompt}?"),
    "loss.kl_placement": {"loss.kl_estimator": None},
    "loss.kind": SAPO,
    "loss.max_ratio": CISPO,
    "loss.tau_positive": SAPO,
    "loss.tau_negative": SAPO,
    "loss.log_clip": {"loss": {"kind": "gmpo", **KL}, "advantage.credit": "image"},
    "loss.function": CUSTOM,
    "loss.folder": CUSTOM,
    "loss.min_importance_ratio": {"loss.importance_weights": "mask"},
}
"""What else is set."""


def beside(key: str, values: dict[str, Any]) -> dict[str, object]:
    term = key.rpartition(".")[0]
    kind = term.rpartition(".")[2]
    if key not in BESIDE and kind in KINDS and kind not in values["reward"]["terms"]:
        return {term: {"kind": kind, "weight": 0.1, **REQUIRED_OPTIONS[kind]}}
    return BESIDE.get(key, {})


@pytest.mark.parametrize("key", OTHER)
def test_a_key_that_is_set_is_stored_and_compared_on_resume(
    values: dict[str, Any], key: str
) -> None:
    set_keys(values, beside(key, values))
    before = validate_config(values)

    after = validate_config(set_keys(values, {key: OTHER[key]}))

    stored = after.model_dump(mode="json")
    assert flatten(stored)[key] == OTHER[key]
    assert validate_config(stored) == after
    differences = config_differences(before, after)
    if key.startswith(MAY_CHANGE):
        assert differences == []
    else:
        assert key in differences


def test_every_key_has_such_a_value() -> None:
    keys = set(known_keys(Config))
    sections = {key.rpartition(".")[0] for key in keys} | {"reward.terms"}
    common = {
        f"reward.terms.{kind}.{option}"
        for kind in KINDS
        for option in TermConfig.model_fields
        if kind != "ssim"
    }
    kinds = {f"reward.terms.{kind}.kind" for kind in KINDS}
    assert keys - sections - common - kinds == set(OTHER)
