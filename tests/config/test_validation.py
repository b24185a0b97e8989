"""Values that are refused, each with its key, its value and the rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from glm_grpo.config import from_yaml, to_yaml, validate_config
from glm_grpo.errors import ConfigError
from glm_grpo.studio.rescore.rescore import override_weighing
from tests.config.conftest import set_keys

Bend = Callable[[str, object], dict[str, Any]]

MINE = {"reward.terms.mine": {"kind": "custom", "weight": 0.1}}
GMPO = {"kind": "gmpo", "kl_coef": 0.0, "kl_placement": "loss", "kl_behaviour_coef": 0.0}

# What is set, the refused key last, and a phrase of the rule or the remedy.
REFUSED: list[tuple[dict[str, object], str]] = [
    # Types: nothing is converted silently.
    ({"rollout.group_size": "8"}, "valid integer"),
    ({"rollout.group_size": True}, "valid integer"),
    ({"optim.learning_rate": True}, "valid number"),
    ({"optim.learning_rate": float("nan")}, "finite number"),
    ({"model.gradient_checkpointing": "yes"}, "valid boolean"),
    ({"data.path": None}, "for example data.path=prompts.txt"),
    ({"run.name": 2024}, "valid string"),
    ({"model.adapter": 8}, "valid dictionary"),
    ({"reward.terms.ssim": 0.2}, "write ssim: {weight: 0.2}, on the command line ssim=0.2"),
    ({"trackers": "wandb"}, "valid tuple"),
    ({"model.path": ""}, "at least 1 character"),
    # Bounds; the purpose of the key stands behind.
    ({"rollout.group_size": 1}, "nothing to be compared with"),
    ({"rollout.height": 15}, "greater than or equal to 16"),
    ({"rollout.batch_size": 7}, "images of a prompt are sampled together"),
    ({"rollout.top_p": 1.5}, "less than or equal to 1"),
    ({"decode.guidance_scale": 0.5}, "greater than or equal to 1"),
    ({"train.seed": -1}, "greater than or equal to 0"),
    # Choices.
    ({"model.dtype": "flot16"}, "did you mean float16?"),
    ({"optim.schedule": "linear"}, "'cosine' or 'constant'"),
    ({"loss.kind": "clip"}, "must be one of clipped, cispo, sapo, gmpo, custom"),
    ({"async.address": "here:65536"}, "a port is a number from 0 to 65535"),
    ({"async.gpus_per_collector": 1.5}, "whole accelerators or a fraction of one"),
    # Keys.
    ({"optim.learning_rte": 0.1}, "did you mean optim.learning_rate?"),
    ({"learning_rate": 0.1}, "TRL's learning_rate is optim.learning_rate here"),
    ({"eval.every": 0}, "did you mean train.eval_every?"),
    ({"weight": 0.1}, "did you mean sft.weight or reward.terms."),
    ({"data.shuffle": True}, "use one of path, eval_path"),
    ({"rollouts": {}}, "did you mean rollout?"),
    # Text for people.
    ({"run.name": "two\nlines"}, "must be one line of text"),
    ({"run.notes": "a \x1b[31mred word"}, "without control characters"),
    ({"run.tags": ["t"] * 33}, "at most 32"),
    # Terms.
    ({"reward.terms.lpip": {"weight": 0.1}}, "did you mean lpips?"),
    (MINE | {"reward.terms.mine.function": "score"}, "write my_folder/my_file.py:my_function"),
    (MINE | {"reward.terms.mine.function": "rewards:f"}, "name the file: rewards.py:f"),
    # Relations between keys.
    ({"model.quantization": "nf4"}, "model.adapter="),
    ({"decode.rollout_steps": 5}, "must not exceed decode.steps = 4"),
    ({"advantage.std_floor": 0.0}, "mean_only"),
    ({"loss.kl_coef": 0.0, "loss.kl_placement": "reward"}, "needs loss.kl_coef > 0"),
    ({"loss": GMPO, "advantage.credit": "place"}, "can weigh each token by itself"),
    ({"loss.kl_estimator": "k1"}, "expectation of its gradient is 0"),
    ({"loss.kl_placement": "reward", "loss.kl_estimator": "k3"}, "=null or k1"),
    ({"loss.two_sided_clip": 1.2}, "above 1 + clip_high = 1.2"),
    ({"train.minibatches": 9}, "whole groups"),
    ({"train.mode": "async", "train.method": "sft"}, "needs train.mode=sync"),
    ({"train.mode": "async", "rollout.dynamic_sampling_rounds": 2}, "train.mode is async"),
    ({"train.mode": "async", "loss.reference_sync_steps": 5}, "train.mode is async"),
    ({"loss.min_importance_ratio": 0.5}, "needs loss.importance_weights=mask"),
    # 1024 prompts x 8 images.
    (
        {"rollout.prompts_per_step": 1024, "rollout.width": 16_384, "rollout.height": 16_384},
        "makes 2,199,023,255,552 pixels per step",
    ),
]


@pytest.mark.parametrize(("changes", "phrase"), REFUSED, ids=str)
def test_a_bad_value_is_refused_with_key_value_and_rule(
    values: dict[str, Any], changes: dict[str, object], phrase: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_config(set_keys(values, changes))
    key, value = [*changes.items()][-1]
    heading, problem, rule, *remedy = str(caught.value).splitlines()
    assert heading == "The config has 1 problem:"
    assert problem == f"  {key} = {value!r}"
    assert rule.startswith("    rule:   ")
    assert phrase in " ".join([rule, *remedy])


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("trackers", ["aim", "wandbb"], r"trackers\[1\] = 'wandbb'[\s\S]*did you mean wandb\?"),
        ("run.tags", [2024], r"run\.tags\[0\] = 2024[\s\S]*valid string"),
        ("reward.watch", ["ssim"], r"set reward\.terms\.ssim\.weight=0"),
        ("reward.terms.near", {"kind": "lpisp"}, r"near\.kind = 'lpisp'[\s\S]*did you mean lpips"),
        ("reward.terms.ocr", {"weight": 0.3}, r"terms\.ocr\.engine = None[\s\S]*engine=rapidocr"),
        ("model.adapter", {"rank": 4}, r"adapter\.alpha \(not given\)"),
        ("model.adapter", {"rank": 0, "alpha": 8.0}, r"adapter\.rank = 0"),
    ],
)
def test_a_bad_part_of_a_value_is_refused_by_its_own_key(
    bend: Bend, key: str, value: object, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        validate_config(bend(key, value))


def test_all_problems_are_listed_at_once(values: dict[str, Any]) -> None:
    changes: dict[str, object] = {"train.steps": 0, "rollout.group_size": 1, "optim": {}}
    with pytest.raises(ConfigError, match="has 9 problems:") as caught:
        validate_config(set_keys(values, changes))
    for named in ("train.steps = 0", "rollout.group_size = 1", "optim.learning_rate (not given)"):
        assert named in str(caught.value)


def test_all_broken_relations_are_listed_at_once(values: dict[str, Any]) -> None:
    set_keys(values, {"decode.rollout_steps": 10, "advantage.std_floor": 0.0})
    with pytest.raises(ConfigError, match="2 problems"):
        validate_config(values)


def test_a_long_list_of_problems_is_cut(bend: Bend) -> None:
    with pytest.raises(ConfigError, match=r"has 20 problems:(.|\n)*\n  and 5 more$"):
        validate_config(bend("trackers", ["nope"] * 20))


@pytest.mark.parametrize(
    ("sizes", "key"),
    [
        # 65,536 x 65,536 x 4 x 4 tokens; 16 x 65,536 x 32 x 32.
        ({"prompts_per_step": 65_536, "group_size": 65_536}, "prompts_per_step"),
        (
            {"prompts_per_step": 16, "group_size": 65_536, "height": 1024, "width": 1024},
            "group_size",
        ),
    ],
)
def test_of_too_many_tokens_the_size_that_was_mistyped_is_named(
    values: dict[str, Any], sizes: dict[str, int], key: str
) -> None:
    set_keys(values, {f"rollout.{name}": size for name, size in sizes.items()})
    with pytest.raises(ConfigError, match=rf"rollout\.{key} = \d+\n.*pixels per step"):
        validate_config(values)


def test_an_option_of_another_kind_of_loss_is_refused(bend: Bend) -> None:
    with pytest.raises(
        ConfigError, match=r"not an option of loss.kind = sapo(.|\n)*'~loss.clip_high'"
    ):
        validate_config(bend("loss.kind", "sapo"))


def test_mean_only_needs_no_std_floor(bend: Bend) -> None:
    bend("advantage.std_floor", 0.0)
    assert validate_config(bend("advantage.normalization", "mean_only")).advantage.std_floor == 0.0


def test_the_kl_has_the_estimator_of_its_placement_unless_another_is_set(
    values: dict[str, Any],
) -> None:
    set_keys(values, {"loss.kl_placement": "loss", "loss.kl_estimator": None})
    assert validate_config(values).loss.kl_estimator == "k3_corrected"
    set_keys(values, {"loss.kl_placement": "reward"})
    assert validate_config(values).loss.kl_estimator == "k1"


@pytest.mark.parametrize(("estimator", "placement"), [("k1", "loss"), ("k3", "reward")])
def test_a_run_with_an_estimator_of_no_use_is_still_read(
    values: dict[str, Any], estimator: str, placement: str
) -> None:
    set_keys(values, {"loss.kl_placement": placement, "loss.kl_estimator": estimator})
    stored = from_yaml(to_yaml(validate_config(values, is_stored=True)))
    assert stored.loss.kl_estimator == estimator
    # As rescoring does.
    changed = override_weighing(stored, ["reward.terms.ocr.weight=0.5"])
    assert changed.loss.kl_estimator == estimator


def test_configs_of_older_runs_are_read(values: dict[str, Any]) -> None:
    del values["loss"]["kind"]
    del values["run"]
    config = from_yaml(yaml.safe_dump(values))
    assert (config.loss.kind, config.run.name) == ("clipped", None)
