from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from glm_grpo.config import from_yaml, to_yaml, validate_config
from glm_grpo.errors import ConfigError
from glm_grpo.rescoring.rescore import override_weighing

Bend = Callable[[str, object], dict[str, Any]]

# key, value, what the rule says, what the remedy says
BAD_VALUES = [
    ("model.path", "", "at least 1 character", "correct model.path"),
    ("model.dtype", "float16", "must be one of float32, bfloat16", "did you mean bfloat16?"),
    ("model.adapter", {"rank": 0, "alpha": 8.0}, "must be at least 1", "model.adapter.rank to 1"),
    ("model.adapter", {"rank": 4, "alpha": 0.0}, "must be at least 1e-06", "1e-06 or more"),
    ("model.adapter", {"rank": 4}, "is needed", "write model.adapter.alpha="),
    ("model.adapter", 8, "must be a section", "correct model.adapter"),
    ("model.gradient_checkpointing", "yes", "must be true or false", "without quotation marks"),
    ("model.gradient_checkpointing", 1, "must be true or false", "correct"),
    ("data.path", None, "must be text", "correct data.path"),
    ("rollout.prompts_per_step", 0, "must be at least 1", "1 or more"),
    ("rollout.group_size", 1, "nothing to be compared with", "set rollout.group_size to 2 or more"),
    ("rollout.group_size", "8", "must be a whole number", "without quotation marks"),
    ("rollout.group_size", True, "must be a whole number", "correct rollout.group_size"),
    ("rollout.group_size", 8.0, "must be a whole number", "correct rollout.group_size"),
    ("rollout.height", 100, "must be a multiple of 32", "set rollout.height to a multiple of 32"),
    ("rollout.width", 0, "must be at least 32", "set rollout.width to 32 or more"),
    ("rollout.temperature", 0.0, "must be at least 0.001", "0.001 or more"),
    ("rollout.temperature", float("nan"), "must be a finite number", "correct"),
    ("rollout.top_p", 1.5, "must be at most 1", "1 or less"),
    ("rollout.top_p", 0.0, "must be greater than 0", "more than 0"),
    ("rollout.top_k", 0, "must be at least 1", "1 or more"),
    ("decode.steps", 2.5, "must be a whole number", "decode.steps"),
    ("decode.guidance_scale", 0.5, "must be at least 1", "1 or more"),
    ("decode.rollout_steps", 0, "must be at least 1", "1 or more"),
    ("decode.rollout_steps", 5, "must not exceed decode.steps = 4", "decode.rollout_steps=4"),
    ("decode.recheck_every", 0, "must be at least 1", "1 or more"),
    ("decode.recheck_groups", 0, "must be at least 1", "1 or more"),
    ("decode.min_rank_correlation", 1.5, "must be at most 1", "1 or less"),
    ("decode.min_rank_correlation", -1.5, "must be at least -1", "-1 or more"),
    ("advantage.normalization", "group", "must be one of group_std, mean_only", "group_std?"),
    ("advantage.std_floor", -0.1, "must be at least 0", "0 or more"),
    ("advantage.std_floor", 0.0, "a standard deviation that can be 0", "mean_only"),
    ("advantage.clip", 0.0, "must be greater than 0", "more than 0"),
    ("loss.clip_low", 1.0, "must be less than 1", "less than 1"),
    ("loss.clip_high", 0.0, "must be greater than 0", "more than 0"),
    ("loss.kl_coef", -1.0, "must be at least 0", "0 or more"),
    ("loss.kl_estimator", "k4", "one of k3_corrected, k1, k2, k3", "loss.kl_estimator=k3_corr"),
    ("loss.kl_estimator", "k1", "expectation of its gradient is 0", "=k3_corrected or k2"),
    ("loss.kl_placement", "advantage", "must be one of loss, reward", "kl_placement=loss"),
    ("loss.kl_behaviour_coef", "0.1", "must be a number", "without quotation marks"),
    ("loss.preview_weight", -0.1, "must be at least 0", "0 or more"),
    ("loss.preview_weight", 1.1, "must be at most 1", "1 or less"),
    ("loss.top_entropy_quantile", 0.0, "must be greater than 0", "more than 0"),
    ("loss.top_entropy_quantile", 1.1, "must be at most 1", "1 or less"),
    ("optim.learning_rate", 0.0, "must be greater than 0", "more than 0"),
    ("optim.learning_rate", True, "must be a number", "correct optim.learning_rate"),
    ("optim.schedule", "linear", "must be one of cosine, constant", "set optim.schedule=cosine"),
    ("optim.betas", 0.9, "must be a list", "correct optim.betas"),
    ("optim.betas", [0.9], "is needed", "write optim.betas=[0.9,...]"),
    ("optim.betas", [1.0, 0.99], "must be less than 1", "write optim.betas=[...,0.99]"),
    ("optim.max_grad_norm", float("inf"), "must be a finite number", "correct"),
    ("train.steps", 0, "must be at least 1", "1 or more"),
    ("train.seed", -1, "must be at least 0", "0 or more"),
    ("model.quantization", "nf4", "must be absent where model.adapter is", "model.adapter="),
    ("model.quantization", "int8", "must be one of nf4", "set model.quantization=nf4"),
    ("decode.quantization", "nf4", "must be one of float8", "set decode.quantization=float8"),
    ("decode.batch_size", 0, "must be at least 1", "1 or more"),
    ("train.keep_checkpoints", 0, "must be at least 1", "1 or more"),
    ("train.resume", True, "must be text", "correct train.resume"),
    ("eval.samples_per_prompt", 0, "must be at least 1", "1 or more"),
    ("offload", "all", "must be one of none, modules", "offload=none"),
    ("trackers", "tensorboard", "must be a list", "correct trackers"),
    ("trackers", ["aim", "wandbb"], "must be one of tensorboard", "write trackers=[aim,wandb]"),
    ("trackers", ["nope"], "must be one of tensorboard", "write trackers=[tensorboard]"),
    ("trackers", ["aim", "nope"], "must be one of tensorboard", "write trackers=[aim]"),
    ("trackers", ["aims", "aim"], "must be one of tensorboard", "write trackers=[aim]"),
    ("reward.watch", [1, "psnr"], "must be text", "write reward.watch=[...,psnr]"),
    ("run_dir", "", "at least 1 character", "correct run_dir"),
    ("run.name", "two\nlines", "must be one line of text", "a word or two"),
    ("run.name", "n" * 121, "at most 120 characters", "correct run.name"),
    ("run.name", 12, "must be text", "correct run.name"),
    ("run.notes", "a \x1b[31mred word", "without control characters", "take them out"),
    ("run.notes", "half of a pair: \ud83d", "that UTF-8 can hold", "correct run.notes"),
    ("run.notes", "n" * 5001, "at most 5000 characters", "correct run.notes"),
    ("run.tags", "baseline", "must be a list", "correct run.tags"),
    ("run.tags", ["ocr", " "], "must be one line of text", "write run.tags=[ocr,...]"),
    ("run.tags", ["t"] * 33, "at most 32", "correct run.tags"),
    ("run.title", "a", "is not a key of run", "use one of name, "),
    ("optim.learning_rte", 0.1, "is not a key of optim", "did you mean optim.learning_rate?"),
    ("learning_rate", 0.1, "is not a key of the config", "did you mean optim.learning_rate?"),
    ("eval.every", 0, "is not a key of eval", "did you mean train.eval_every?"),
    ("data.train", "p", "is not a key of data", "use one of path, "),
    ("data.shuffle", True, "is not a key of data", "use one of path, eval_path"),
    ("rollouts", {}, "is not a key of the config", "did you mean rollout?"),
    ("weight", 0.1, "is not a key of the config", "did you mean anchor.weight or reward.terms."),
    ("reward.combine", "sum", "must be one of weighted_sum", "set reward.combine=weighted_sum"),
    ("reward.on_hacking", "halt", "must be one of warn, stop", "set reward.on_hacking=warn"),
    ("reward.canary_margin", 0.0, "must be greater than 0", "more than 0"),
    ("reward.watch", ["ssim"], "what is trained on cannot watch", "set reward.terms.ssim.weight=0"),
    ("reward.terms.ssim", 0.2, "must be a section", "write ssim: {weight: 1.0}"),
    ("reward.terms.ssim.weight", float("nan"), "must be a finite number", "correct reward."),
    ("reward.terms.ssim.weight", "0.2", "must be a number. Factor of", "without quotation marks"),
    ("reward.terms.ssim.std_floor", 0.0, "must be greater than 0", "more than 0"),
    ("reward.terms.ssim.timeout_seconds", -1.0, "must be greater than 0", "more than 0"),
    ("reward.terms.ssim.window", 11, "is not an option of kind ssim", "did you mean kind?"),
    ("reward.terms.ocr.threads", 0, "must be at least 1. Pictures read", "threads to 1 or more"),
    ("reward.terms.ocr.engine", "tesseract", "must be one of easyocr", "set engine=rapidocr"),
    (
        "reward.terms.near",
        {"weight": 0.1},
        "'near' is not a reward term",
        "+reward.terms.near.kind=custom",
    ),
    ("reward.terms.lpip", {"weight": 0.1}, "'lpip' is not a reward term", "did you mean lpips?"),
    ("reward.terms.Near", {"kind": "ssim"}, "is made of small letters", "rename it"),
    # Figures of a run bear these names.
    ("reward.terms.total", {"kind": "ssim"}, "is the name of another figure", "total_term"),
    ("reward.terms.ocr_exact", {"kind": "ssim"}, "is the name of another figure", "ocr_exact_term"),
    ("reward.terms.dark_fraction", {"kind": "ssim"}, "the name of another figure", "rename it"),
    # What would overflow later.
    ("rollout.prompts_per_step", 10**6, "must be at most 65536", "65536 or less"),
    ("rollout.group_size", 10**30, "must be at most 65536", "65536 or less"),
    ("rollout.height", 10**6 // 32 * 32, "must be at most 16384", "16384 or less"),
    ("rollout.width", 32 * 10**30, "must be at most 16384", "16384 or less"),
    ("eval.samples_per_prompt", 10**7, "must be at most 65536", "65536 or less"),
    ("train.steps", 10**30, "must be at most 1000000000", "1000000000 or less"),
    ("train.seed", 2**63, "must be at most 9223372036854775807", "or less"),
    ("eval.seed", 2**64, "must be at most 9223372036854775807", "or less"),
    ("train.checkpoint_every", 10**30, "a whole number of 64 bits", "or less"),
    ("optim.warmup_steps", 2**63, "a whole number of 64 bits", "or less"),
    ("decode.steps", 10**5, "must be at most 10000", "10000 or less"),
    ("rollout.temperature", 1e-300, "must be at least 0.001", "or more"),
    ("optim.epsilon", 1e-300, "must be 0, or 1e-30 to 1e+12 in size: float32", "range"),
    ("optim.learning_rate", 1e300, "must be at most 10", "10 or less"),
    ("loss.kl_coef", 1e300, "must be 0, or 1e-30 to 1e+12", "a number in this range"),
    ("loss.clip_high", 5e-324, "must be 0, or 1e-30 to 1e+12", "a number in this range"),
    ("optim.betas", [1e-300, 0.9], "must be 0, or 1e-30 to 1e+12", "a number in this range"),
    ("reward.terms.ocr.weight", -1e300, "must be 0, or 1e-30 to 1e+12", "in this range"),
    ("reward.terms.ocr.timeout_seconds", 1e10, "must be at most 1e+06", "1e+06 or less"),
    ("reward.terms.ocr.threads", 10**9, "must be at most 1024", "1024 or less"),
    ("async.address", "here:65536", "a port is 0 to 65535", "correct async.address"),
    ("model.path", "a\0b", "must not hold a null character", "another folder or file"),
    ("data.path", "x/" * 2050, "must have at most 4095 bytes", "another folder or file"),
    ("run_dir", "caf\udce9", "must be text that UTF-8 can hold", "correct run_dir"),
    ("train.resume", "x" * 256, "at most 255 bytes between two slashes", "another folder or"),
    ("reward.terms.aesthetic.head", "ä" * 200, "at most 255 bytes between two", "another folder"),
    ("reward.terms.ocr.languages", ["en\0"], "is not an option of engine", "easyocr"),
]


@pytest.mark.parametrize(("key", "value", "rule", "remedy"), BAD_VALUES)
def test_validate_config_refuses_with_key_value_rule_and_remedy(
    bend: Bend, key: str, value: object, rule: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_config(bend(key, value))
    heading, problem, rule_line, remedy_line = str(caught.value).splitlines()
    assert heading == "The config has 1 problem:"
    assert problem.startswith(f"  {key}")
    shown = repr(value) if len(repr(value)) < 400 else f"{value!r:.400}..."
    assert problem.endswith(("(not given)", f"= {shown}")) or not isinstance(value, str | int)
    assert rule_line.startswith("    rule:   ")
    assert rule in rule_line
    assert remedy_line.startswith("    remedy: ")
    assert remedy in remedy_line


GOOD_VALUES = [
    ("model.path", "zai-org/GLM-Image"),
    ("model.adapter", {"rank": 1, "alpha": 0.5}),
    ("rollout.prompts_per_step", 1),
    ("rollout.group_size", 2),
    ("rollout.temperature", 1),
    ("rollout.top_p", 1.0),
    ("rollout.top_k", 1),
    ("decode.guidance_scale", 1.0),
    ("decode.batch_size", 1),
    ("decode.quantization", "float8"),
    ("decode.rollout_steps", 1),
    ("decode.rollout_steps", 4),
    ("decode.recheck_groups", 1000),
    ("decode.min_rank_correlation", -1.0),
    ("advantage.clip", None),
    ("loss.kl_coef", 0),
    ("loss.preview_weight", 0.0),
    ("loss.preview_weight", 1.0),
    ("loss.top_entropy_quantile", 1.0),
    ("optim.betas", [0.0, 0.999]),
    ("optim.warmup_steps", 0),
    ("train.micro_batch_size", 1),
    ("train.resume", "auto"),
    ("trackers", []),
]


@pytest.mark.parametrize(("key", "value"), GOOD_VALUES)
def test_validate_config_accepts_values_at_the_bounds(bend: Bend, key: str, value: object) -> None:
    section: Any = validate_config(bend(key, value)).model_dump(mode="json")
    for name in key.split("."):
        section = section[name]
    assert section == value


def test_validate_config_lists_all_problems_at_once(bend: Bend) -> None:
    bend("train.steps", 0)
    bend("rollout.group_size", 1)
    with pytest.raises(ConfigError, match="2 problems") as caught:
        validate_config(bend("decode.steps", 4))
    assert "rollout.group_size = 1" in str(caught.value)
    assert "train.steps = 0" in str(caught.value)


def test_validate_config_counts_the_problems_it_leaves_out(bend: Bend) -> None:
    with pytest.raises(ConfigError, match=r"has 1000 problems:(.|\n)*\n  and 985 more$") as caught:
        validate_config(bend("trackers", ["nope"] * 1000))
    assert len(str(caught.value)) < 5000


def test_validate_config_lists_all_broken_relations_at_once(bend: Bend) -> None:
    bend("decode.rollout_steps", 10)
    with pytest.raises(ConfigError, match="2 problems"):
        validate_config(bend("advantage.std_floor", 0.0))


def test_kl_in_the_reward_needs_a_coefficient(bend: Bend) -> None:
    bend("loss.kl_coef", 0.0)
    with pytest.raises(ConfigError, match=r"loss.kl_placement = 'reward'\n.* loss.kl_coef > 0"):
        validate_config(bend("loss.kl_placement", "reward"))
    bend("loss.kl_coef", 0.01)
    assert validate_config(bend("loss.kl_placement", "reward")).loss.kl_placement == "reward"


def test_the_kl_has_the_estimator_of_its_placement_unless_another_is_set(bend: Bend) -> None:
    assert validate_config(bend("loss.kl_placement", "loss")).loss.kl_estimator == "k3_corrected"
    bend("loss.kl_placement", "reward")
    assert validate_config(bend("loss.kl_estimator", None)).loss.kl_estimator == "k1"
    assert validate_config(bend("loss.kl_estimator", "k1")).loss.kl_estimator == "k1"
    for estimator in ("k2", "k3", "k3_corrected"):
        with pytest.raises(ConfigError, match=r"subtracted from the reward is k1"):
            validate_config(bend("loss.kl_estimator", estimator))


@pytest.mark.parametrize(("estimator", "placement"), [("k1", "loss"), ("k3", "reward")])
def test_a_run_with_an_estimator_of_no_use_is_still_read(
    bend: Bend, estimator: str, placement: str
) -> None:
    bend("loss.kl_placement", placement)
    values = bend("loss.kl_estimator", estimator)
    with pytest.raises(ConfigError, match=r"loss.kl_estimator"):
        validate_config(values)
    stored = from_yaml(to_yaml(validate_config(values, is_stored=True)))
    assert stored.loss.kl_estimator == estimator
    # As rescoring does.
    changed = override_weighing(stored, ["reward.terms.ocr.weight=0.5"])
    assert changed.loss.kl_estimator == estimator


@pytest.mark.parametrize(
    ("sizes", "key", "tokens"),
    [
        # 1000 x 4 x 512 x 512 tokens; 16 x 65,536 x 32 x 32; 65,536 x 65,536 x 4 x 4.
        ({"prompts_per_step": 1000, "height": 16_384, "width": 16_384}, "height", "1,048,576,000"),
        ({"group_size": 65_536, "height": 1024, "width": 1024}, "group_size", "1,073,741,824"),
        ({"prompts_per_step": 65_536, "group_size": 65_536}, "prompts_per_step", "68,719,476,736"),
    ],
)
def test_more_tokens_than_any_memory_holds_are_refused(
    bend: Bend, sizes: dict[str, int], key: str, tokens: str
) -> None:
    for name, value in ({"prompts_per_step": 16, "group_size": 4} | sizes).items():
        bend(f"rollout.{name}", value)
    with pytest.raises(ConfigError, match=rf"rollout\.{key} = \d+\n.*makes {tokens} tokens a step"):
        validate_config(bend("offload", "none"))


def test_mean_only_needs_no_std_floor(bend: Bend) -> None:
    bend("advantage.std_floor", 0.0)
    assert validate_config(bend("advantage.normalization", "mean_only")).advantage.std_floor == 0.0


def test_a_missing_section_is_named(values: dict[str, Any]) -> None:
    del values["decode"]
    with pytest.raises(ConfigError, match=r"decode \(not given\)"):
        validate_config(values)


def test_the_key_of_a_list_item_names_the_list_and_its_place(bend: Bend) -> None:
    with pytest.raises(ConfigError, match=r"(?m)^  trackers\[1\] = 'nope'$"):
        validate_config(bend("trackers", ["tensorboard", "nope"]))
    bend("trackers", [])
    with pytest.raises(ConfigError, match=r"(?m)^  optim.betas\[1\] \(not given\)$"):
        validate_config(bend("optim.betas", [0.9]))


def test_a_weight_that_is_no_number_is_not_said_to_watch(bend: Bend) -> None:
    with pytest.raises(ConfigError, match=r"`reward.watch` makes such a term a canary") as caught:
        validate_config(bend("reward.terms.ocr.weight", float("nan")))
    assert "0 to watch" not in str(caught.value)


def test_remedy_of_an_item_does_not_repeat_a_long_list(bend: Bend) -> None:
    long = "x" * 5000
    with pytest.raises(ConfigError) as caught:
        validate_config(bend("optim.betas", [long, long]))
    message = str(caught.value)
    assert len(message) < 2000
    assert "correct it" in message


def test_option_of_another_kind_of_loss_is_refused_with_the_way_to_leave_it_out(bend: Bend) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_config(bend("loss.kind", "custom"))
    message = str(caught.value)
    assert "is no option of loss.kind = custom" in message
    assert "~loss.clip_" in message


def test_unknown_kind_of_loss_is_refused_with_the_kinds(bend: Bend) -> None:
    with pytest.raises(ConfigError, match="must be one of clipped, cispo, sapo, gmpo, custom"):
        validate_config(bend("loss.kind", "clip"))


def test_loss_of_an_older_run_has_the_kind_there_was(bend: Bend) -> None:
    values: Any = bend("loss.kind", "clipped")
    del values["loss"]["kind"]
    assert validate_config(values).loss.kind == "clipped"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train.minibatches_per_rollout": 100},
            "minibatches_per_rollout = 100(.|\n)*whole groups",
        ),
        ({"loss.preview_weight": 0.5, "data.sources": 1}, "preview_weight(.|\n)*have no preview"),
        (
            {"train.method": "sft", "train.mode": "async"},
            "train.method(.|\n)*needs train.mode=sync",
        ),
        (
            {"rollout.refill_rounds": 2, "train.mode": "async"},
            "rollout.refill_rounds(.|\n)*train.mode is async",
        ),
        (
            {"loss.reference_sync_every": 5, "train.mode": "async"},
            "reference_sync_every(.|\n)*train.mode is async",
        ),
        ({"loss.ratio_cap": 1.1}, r"ratio_cap = 1\.1(.|\n)*above 1 \+ clip_high = 1\.2"),
    ],
)
def test_keys_of_the_update_at_odds_are_refused(
    bend: Bend, changes: dict[str, object], message: str
) -> None:
    values: Any = bend("train.steps", 40)
    for key, value in changes.items():
        section, name = key.split(".")
        values[section][name] = value
    with pytest.raises(ConfigError, match=message):
        validate_config(values)
