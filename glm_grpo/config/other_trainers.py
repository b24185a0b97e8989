"""What keys of TRL, flow_grpo and verl are called here, for those who come from there.

A config or override with a foreign key is answered with ours, and `tools.site.reference` writes
the page of all of them. Names that would choose a GPU are answered with what chooses one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from glm_grpo.config.root import Config
from rewards.problems import Problem, known_keys

_TERMS = "reward.terms."
_MISTYPED = 0.8
"""Similarity from which a name is another one of its section mistyped, such as `optim.beta`."""
_SHORTEST = 3
"""Characters of a last part by which a key is known without its section; `n` could be anything."""
_ANYTHING = ("enable",)
"""Longer ones that could be anything as well."""
_OF_A_GPU = ("device", "devices", "cuda", "gpu", "gpus", "gpu_id", "gpu_ids")
"""Names, without their section, by which programs choose a GPU."""
_CHOOSE_A_GPU = (
    "choose the GPU with the environment variable CUDA_VISIBLE_DEVICES, such as "
    "CUDA_VISIBLE_DEVICES=3 glm-grpo train ..."
)


@dataclass(frozen=True)
class Counterpart:
    """One setting, by its names in the trainers that have it.

    Attributes:
        ours: Key; None if there is nothing to set.
        trl: Names in `GRPOConfig`, or in peft's `LoraConfig`, separated by spaces.
        flow_grpo: Names in its `config/base.py`.
        verl: Names in its `ppo_trainer.yaml`, below `actor_rollout_ref` without that.
        note: How values differ, or why there is nothing to set.
    """

    ours: str | None
    trl: str = ""
    flow_grpo: str = ""
    verl: str = ""
    note: str = ""

    def names(self) -> dict[str, str]:
        """Trainers by the names that they use."""
        columns = {"TRL": self.trl, "flow_grpo": self.flow_grpo, "verl": self.verl}
        return {name: trainer for trainer, names in columns.items() for name in names.split()}


COUNTERPARTS: Sequence[Counterpart] = (
    Counterpart(
        "rollout.group_size",
        trl="num_generations",
        flow_grpo="sample.num_image_per_prompt",
        verl="rollout.n",
    ),
    Counterpart(
        "rollout.prompts_per_step",
        trl="generation_batch_size",
        flow_grpo="sample.num_batches_per_epoch",
        verl="data.train_batch_size",
        note="counts prompts, as in verl; TRL counts images, flow_grpo batches of images",
    ),
    Counterpart(
        "rollout.batch_size",
        flow_grpo="sample.train_batch_size",
        note="null samples all images of a step at once",
    ),
    Counterpart(
        "train.micro_batch_size",
        trl="per_device_train_batch_size",
        flow_grpo="train.batch_size",
        verl="actor.ppo_micro_batch_size_per_gpu",
        note="changes memory and speed, not the gradient",
    ),
    Counterpart(
        "train.micro_batch_size",
        trl="gradient_accumulation_steps",
        flow_grpo="train.gradient_accumulation_steps",
        note="accumulation follows from it: an update adds up as many passes as its images need",
    ),
    Counterpart(
        "train.minibatches",
        trl="steps_per_generation",
        verl="actor.ppo_mini_batch_size",
        note="counts updates per epoch; verl counts the prompts of one, TRL micro-batches",
    ),
    Counterpart(
        "train.epochs_per_rollout",
        trl="num_iterations",
        flow_grpo="train.num_inner_epochs",
        verl="actor.ppo_epochs",
    ),
    Counterpart(
        "loss.kl_coef",
        trl="beta",
        flow_grpo="train.beta",
        verl="actor.kl_loss_coef actor.use_kl_loss algorithm.kl_ctrl.kl_coef",
        note="0 skips the reference model",
    ),
    Counterpart(
        "loss.kl_estimator",
        trl="use_bias_correction_kl",
        verl="actor.kl_loss_type",
        note="`k3_corrected`, the default, is TRL's corrected form; `k3` is `low_var_kl`, `k2` is "
        "`mse`",
    ),
    Counterpart(
        "loss.kl_placement", verl="algorithm.use_kl_in_reward", note="`reward` instead of true"
    ),
    Counterpart(
        "loss.clip_low",
        trl="epsilon",
        flow_grpo="train.clip_range train.clip_range_lt",
        verl="actor.clip_ratio actor.clip_ratio_low",
        note="`loss.clip_high` does not follow it; tokens need 0.2, not flow_grpo's 1e-4",
    ),
    Counterpart(
        "loss.clip_high",
        trl="epsilon_high",
        flow_grpo="train.clip_range_gt",
        verl="actor.clip_ratio_high",
        note="acts only with more than one update per rollout; with `loss=cispo`: `loss.max_ratio`",
    ),
    Counterpart("loss.two_sided_clip", trl="delta", verl="actor.clip_ratio_c"),
    Counterpart(
        "loss.kind",
        trl="loss_type",
        verl="actor.policy_loss.loss_mode",
        note="choose a preset: `loss=clipped`, `gspo`, `cispo`, `sapo` or `gmpo`; `grpo`, `bnpo`, "
        "`dapo` and `dr_grpo` are `clipped`, because all images have the same number of tokens",
    ),
    Counterpart(
        None,
        verl="actor.loss_agg_mode",
        note="all images of a run have the same number of tokens, so all means agree",
    ),
    Counterpart(
        "loss.ratio_level",
        trl="importance_sampling_level",
        note="`sequence` is part of `loss=gspo`",
    ),
    Counterpart("loss.tau_positive", trl="sapo_temperature_pos", note="with `loss=sapo`"),
    Counterpart("loss.tau_negative", trl="sapo_temperature_neg", note="with `loss=sapo`"),
    Counterpart("loss.entropy_coef", trl="entropy_coef", verl="actor.entropy_coeff"),
    Counterpart(
        "loss.importance_weights",
        trl="vllm_importance_sampling_mode vllm_importance_sampling_correction",
        verl="algorithm.rollout_correction.rollout_is",
        note="`truncate` is the default",
    ),
    Counterpart(
        "loss.max_importance_ratio",
        trl="vllm_importance_sampling_clip_max",
        verl="algorithm.rollout_correction.rollout_is_threshold",
    ),
    Counterpart("loss.min_importance_ratio", trl="vllm_importance_sampling_clip_min"),
    Counterpart(
        "loss.reference_sync_steps",
        trl="ref_model_sync_steps sync_ref_model",
        note="null keeps the reference",
    ),
    Counterpart("loss.reference_mixup_alpha", trl="ref_model_mixup_alpha"),
    Counterpart(
        "advantage.normalization",
        trl="scale_rewards",
        flow_grpo="sample.global_std",
        verl="algorithm.norm_adv_by_std_in_grpo",
        note="`group_std`, `batch_std`, or `mean_only` to divide by nothing (Dr. GRPO)",
    ),
    Counterpart("advantage.clip", flow_grpo="train.adv_clip_max"),
    Counterpart(
        "reward.terms.<name>.weight",
        trl="reward_weights reward_funcs",
        flow_grpo="reward_fn",
        verl="custom_reward_function.path",
        note="each term has its own weight; for a function of yours see `reward.terms.<name>`, "
        "`kind: custom`",
    ),
    Counterpart(
        "reward.combine",
        trl="multi_objective_aggregation",
        note="`weighted_sum` is `sum_then_normalize`",
    ),
    Counterpart(
        "rollout.dynamic_sampling_rounds",
        verl="algorithm.filter_groups.enable algorithm.filter_groups.max_num_gen_batches",
        note="0 never replaces groups",
    ),
    Counterpart(
        None,
        trl="max_completion_length",
        verl="data.max_response_length rollout.response_length",
        note="the number of tokens follows from `rollout.height` and `rollout.width`",
    ),
    Counterpart("rollout.height", flow_grpo="resolution", note="and `rollout.width`"),
    Counterpart(
        "decode.rollout_steps", flow_grpo="sample.num_steps", note="null: as in evaluations"
    ),
    Counterpart("decode.steps", flow_grpo="sample.eval_num_steps"),
    Counterpart(
        "decode.guidance_scale",
        flow_grpo="sample.guidance_scale sample.eval_guidance_scale",
        note="of GLM-Image's decoder; Janus-Pro has `rollout.guidance_scale`",
    ),
    Counterpart(
        None,
        flow_grpo="sample.same_latent",
        note="the images of a prompt always share one noise",
    ),
    Counterpart(
        "model.path", trl="model_name_or_path", flow_grpo="pretrained.model", verl="model.path"
    ),
    Counterpart(
        "model.adapter.rank",
        trl="r lora_r",
        flow_grpo="use_lora",
        verl="model.lora_rank",
        note="without `model.adapter`, the language model is trained in full",
    ),
    Counterpart("model.adapter.alpha", trl="lora_alpha", verl="model.lora_alpha"),
    Counterpart(
        "model.adapter.target_modules",
        trl="target_modules lora_target_modules",
        verl="model.target_modules",
        note="null is `all-linear`, but only in the language model",
    ),
    Counterpart(
        None,
        trl="lora_dropout dropout",
        note="a token must be learned with the probability it was drawn with; dropout would change "
        "it at random, so the ratio would not be 1 on-policy",
    ),
    Counterpart("model.start_from", flow_grpo="train.lora_path"),
    Counterpart("model.dtype", trl="bf16 fp16", flow_grpo="mixed_precision", verl="rollout.dtype"),
    Counterpart(
        "model.gradient_checkpointing",
        trl="gradient_checkpointing",
        flow_grpo="activation_checkpointing",
        verl="model.enable_gradient_checkpointing",
    ),
    Counterpart(
        "offload",
        flow_grpo="fsdp_optimizer_offload",
        verl="actor.fsdp_config.param_offload actor.fsdp_config.optimizer_offload",
    ),
    Counterpart("data.path", flow_grpo="dataset", verl="data.train_files"),
    Counterpart("data.eval_path", verl="data.val_files"),
    Counterpart(
        "optim.learning_rate",
        trl="learning_rate",
        flow_grpo="train.learning_rate",
        verl="actor.optim.lr",
    ),
    Counterpart("optim.schedule", trl="lr_scheduler_type", verl="actor.optim.warmup_style"),
    Counterpart("optim.warmup_steps", trl="warmup_steps", verl="actor.optim.lr_warmup_steps"),
    Counterpart(
        "optim.betas",
        trl="adam_beta1 adam_beta2",
        flow_grpo="train.adam_beta1 train.adam_beta2",
        note="both in one list",
    ),
    Counterpart("optim.epsilon", trl="adam_epsilon", flow_grpo="train.adam_epsilon"),
    Counterpart(
        "optim.weight_decay",
        trl="weight_decay",
        flow_grpo="train.adam_weight_decay",
        verl="actor.optim.weight_decay",
    ),
    Counterpart(
        "optim.max_grad_norm",
        trl="max_grad_norm",
        flow_grpo="train.max_grad_norm",
        verl="actor.grad_clip",
    ),
    Counterpart(
        "train.steps",
        trl="max_steps num_train_epochs",
        flow_grpo="num_epochs",
        verl="trainer.total_training_steps trainer.total_epochs",
        note="counts rollouts, not updates or passes over the prompts",
    ),
    Counterpart(
        "train.checkpoint_every", trl="save_steps", flow_grpo="save_freq", verl="trainer.save_freq"
    ),
    Counterpart(
        "train.keep_checkpoints",
        trl="save_total_limit",
        flow_grpo="num_checkpoint_limit",
        verl="trainer.max_actor_ckpt_to_keep",
    ),
    Counterpart(
        "train.eval_every", trl="eval_steps", flow_grpo="eval_freq", verl="trainer.test_freq"
    ),
    Counterpart(
        "train.resume",
        trl="resume_from_checkpoint",
        flow_grpo="resume_from",
        verl="trainer.resume_mode trainer.resume_from_path",
        note="`auto`, or a folder",
    ),
    Counterpart("eval.samples_per_prompt", trl="num_generations_eval", verl="rollout.val_kwargs.n"),
    Counterpart("eval.ema_decay", flow_grpo="train.ema"),
    Counterpart(
        "run_dir",
        trl="output_dir",
        flow_grpo="logdir save_dir",
        verl="trainer.default_local_dir",
    ),
    Counterpart("run.name", trl="run_name", flow_grpo="run_name", verl="trainer.experiment_name"),
    Counterpart("trackers", trl="report_to", verl="trainer.logger"),
)
"""Settings in the order of a run; a name leads to one of them."""

_KEYS = known_keys(Config)


def _index() -> Mapping[str, tuple[str, Counterpart]]:
    """Trainer and setting by name, and by the last part of a name that is none of ours."""
    own = {key.rpartition(".")[2] for key in _KEYS}
    index: dict[str, tuple[str, Counterpart]] = {}
    for each in COUNTERPARTS:
        for name, trainer in each.names().items():
            index.setdefault(name, (trainer, each))
    for name, found in [*index.items()]:
        if (last := name.rpartition(".")[2]) not in (*own, *_ANYTHING) and len(last) >= _SHORTEST:
            index.setdefault(last, found)
    return index


_INDEX = _index()


def counterpart_of(key: str) -> str | None:
    """Say what the key of another trainer is called here; None if it is not known as one.

    For a key that would choose a GPU, say what chooses one.

    Args:
        key: Dotted key that the config does not have. Its sections may be of any trainer, so that
            `beta`, `loss.beta` and `train.beta` have the same answer.
    """
    if key in _KEYS or key.startswith(_TERMS) or _is_mistyped(key):
        return None
    parts = key.split(".")
    if parts[-1] in _OF_A_GPU:
        return _CHOOSE_A_GPU
    for start in range(len(parts)):
        if found := _INDEX.get(name := ".".join(parts[start:])):
            trainer, setting = found
            ours = f"is {setting.ours}" if setting.ours else "has nothing to be set"
            note = f"; {setting.note}" if setting.note else ""
            return f"{trainer}'s {name} {ours} here{note}".replace("`", "")
    return None


def _is_mistyped(key: str) -> bool:
    section, _, name = key.rpartition(".")
    siblings = [end for known in _KEYS if known == f"{section}.{(end := known.rpartition('.')[2])}"]
    return bool(difflib.get_close_matches(name, siblings, n=1, cutoff=_MISTYPED))


def with_counterparts(problem: Problem) -> list[Problem]:
    """Problem of a key, with our name as its remedy where the key is another trainer's.

    A section that only other trainers have, such as `algorithm`, gives one for each of its keys
    that is known.
    """
    if problem.key in _KEYS:
        return [problem]
    told = [
        replace(problem, key=key, value=value, remedy=remedy)
        for key, value in _leaves(problem.key, problem.value)
        if (remedy := counterpart_of(key)) is not None
    ]
    return told or [problem]


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    if not isinstance(value, Mapping):
        yield key, value
        return
    for name, each in value.items():
        yield from _leaves(f"{key}.{name}", each)
