"""What several processes hold of a policy, planned and measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from glm_grpo.models.glm_image.files import PUBLISHED_ID
from glm_grpo.models.glm_image.planner import (
    GlmImagePlanner,
    PartConfigs,
    read_part_configs,
)
from glm_grpo.models.planning import UNDIVIDED, Parallelism
from glm_grpo.plan.memory import (
    BatchShape,
    ShardBytes,
    UpdateBytes,
    plan_memory,
    shard_bytes,
    trained_bytes,
    update_activations,
    update_on_shards,
)
from glm_grpo.tiny.models import PolicySizes, build_policy_model
from tests.factories import tiny_config

ROOT = Path(__file__).resolve().parents[3]

ADAPTER = "model.adapter={rank: 4, alpha: 8.0}"
WAITING = ("decoder", "scorers", "scorers on the CPU")
"""Items in CPU memory while the policy is sharded."""


def config_of(*overrides):
    """Full fine-tuning of 2 x 4 images of 128 x 128 in micro-batches of 4, without a KL."""
    step = ("rollout.prompts_per_step=2", "rollout.group_size=4", "train.micro_batch_size=4")
    model = ("model.adapter=null", "model.gradient_checkpointing=true", "loss.kl_coef=0")
    return tiny_config(*step, *model, *overrides)


def plan(planner, config, processes=UNDIVIDED):
    return plan_memory(
        planner, config, prompt_tokens=30, is_on_accelerator=True, parallelism=processes
    )


@pytest.fixture(scope="module")
def planner(shallow_configs):
    """Plans for one test serve the next."""
    return GlmImagePlanner(shallow_configs)


@pytest.fixture(scope="module")
def measured(programs, tmp_path_factory):
    """By the first of two processes on the CPU that share a policy."""
    folder = tmp_path_factory.mktemp("shards")
    script = str(Path(__file__).with_name("shard_processes.py"))
    sharding = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    sharding |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    for program in programs.start_team(2, folder, script, str(folder), env=sharding):
        assert program.wait() == 0, program.said()
    return json.loads((folder / "0.json").read_text())


def _planned(config, configs, processes):
    return shard_bytes(GlmImagePlanner(configs).language, config.model, processes)


def test_planned_shards_are_those_of_two_processes(measured):
    configs = PartConfigs(build_policy_model(seed=0).config.to_dict(), {}, {}, {})
    shards = _planned(config_of(), configs, Parallelism(2, is_sharded=True))
    # The first process has the rows that are left over.
    assert shards.trained == pytest.approx(measured["weights"], rel=0.01)
    assert measured["weights"] == measured["gradients"]
    assert 2 * shards.trained == pytest.approx(measured["moments"], rel=0.01)
    assert shards.whole == measured["put together"]
    backward = update_activations(
        GlmImagePlanner(configs), config_of(), BatchShape(2, 4, prompt_tokens=30)
    )
    update = update_on_shards(shards, scoring=0, backward=backward)
    # The gradients of a first micro-batch are there already.
    taken = measured["gradients"] + measured["backward"]
    assert update.total == pytest.approx(taken, rel=0.25)
    assert measured["step"] < measured["backward"]


def test_shards_of_the_published_model_are_parts_of_its_weights():
    configs = read_part_configs(PUBLISHED_ID)
    bf16 = config_of("model.dtype=bfloat16")
    mixed = _planned(bf16, configs, Parallelism(8, is_sharded=True, is_mixed=True))
    # Embedding 168,064 x 4,096, head 16,512 x 4,096, last norm 4,096, and in each of 40 layers
    # q 4,096 x 4,096 + 4,096, k and v 256 x 4,096 + 256 each, o 4,096 x 4,096, gate and up
    # 27,392 x 4,096, down 4,096 x 13,696, four norms of 4,096.
    root = 168_064 * 4096 + 16_512 * 4096 + 4096
    layer = 2 * 4096**2 + 4096 + 2 * (256 * 4096 + 256) + 27_392 * 4096 + 4096 * 13_696 + 4 * 4096
    assert (mixed.root, mixed.layer) == (2 * root, 2 * layer)
    assert mixed.whole == 2 * (root + 40 * layer) == 17_829_576_704
    assert mixed.trained == mixed.whole * 2 // 8
    assert mixed.upcast == 2 * mixed.whole
    in_bf16 = _planned(bf16, configs, Parallelism(8, is_sharded=True))
    assert in_bf16.trained == in_bf16.whole // 8
    assert in_bf16.upcast == in_bf16.whole


def test_shards_of_frozen_weights_keep_their_type_and_adapters_are_fp32(shallow_configs):
    config = config_of("model.dtype=bfloat16", ADAPTER)
    shards = _planned(config, shallow_configs, Parallelism(2, is_sharded=True, is_mixed=True))
    language = GlmImagePlanner(shallow_configs).language
    in_bf16 = trained_bytes(language, config_of("model.dtype=bfloat16").model)
    assert shards.frozen == in_bf16 // 2
    assert shards.trained == trained_bytes(language, config.model) // 2


@pytest.mark.parametrize(
    ("scoring", "backward", "expected"),
    [
        # All weights, and 300 beside them.
        (300, 1, UpdateBytes(0, 1000, 300)),
        # Two layers' weights, a layer's gradients, twice that of the last one; the root.
        (1, 2000, UpdateBytes(50, 5 * 10 + 600, 2000)),
        # The root's weights and gradients, twice these, and twice a layer's.
        (1, 1, UpdateBytes(50, 4 * 600 + 2 * 10, 0)),
    ],
    ids=["reading", "learning", "at the end"],
)
def test_update_on_shards_takes_what_its_largest_moment_does(scoring, backward, expected):
    # A small root in the first case.
    root = 100 if expected.gradients == 0 else 600
    shards = ShardBytes(0, 50, whole=1000, layer=10, root=root, upcast=0, widening=2)
    assert update_on_shards(shards, scoring=scoring, backward=backward) == expected


def _items(plan):
    return {item.name: item for item in plan.items}


def test_plan_of_shards_holds_whole_weights_where_images_are_made(planner, shallow_configs):
    config = config_of("loss.kl_coef=0.1", "offload=modules")
    processes = Parallelism(2, is_sharded=True)
    shards = _planned(config, shallow_configs, processes)
    items = _items(plan(planner, config, processes))
    assert items["policy, own shards"].by_phase["idle"] == shards.trained
    assert items["optimizer state"].by_phase["idle"] == 2 * shards.trained
    together = items["policy, put together"].by_phase
    assert together["rollout"] == together["decode"] == together["reward"] == shards.whole
    assert "idle" not in together
    # Not cut, and on the accelerator in the update alone.
    assert items["reference copy"].by_phase.keys() == {"update"}
    assert items["reference copy"].by_phase["update"] >= shards.whole
    assert "language model and head" not in items
    alone = _items(plan(planner, config))
    assert items["decoder"] == alone["decoder"]


def test_plan_of_shards_counts_fp32_copies_in_cpu_memory_before_they_are_cut(shallow_configs):
    # A policy that is larger than its decoder.
    wide = PolicySizes(hidden_size=512, intermediate_size=2048, heads=16, key_value_heads=16)
    parts = replace(
        shallow_configs, language=build_policy_model(seed=0, sizes=wide).config.to_dict()
    )
    planner = GlmImagePlanner(parts)
    config = config_of("model.dtype=bfloat16", "offload=modules")
    sharded = Parallelism(2, is_sharded=True)
    plain, mixed = (
        plan(planner, config, processes) for processes in (sharded, replace(sharded, is_mixed=True))
    )
    waiting = sum(item.cpu for item in mixed.items if item.name in WAITING)
    vision = _items(mixed)["vision tower and VQ"].cpu
    upcast = _planned(config, parts, replace(sharded, is_mixed=True)).upcast
    assert mixed.cpu_at_start == vision + waiting + upcast > plain.cpu_at_start


def test_plan_of_copies_adds_the_buckets_of_their_gradients(planner):
    config = config_of(ADAPTER)
    one, two = (plan(planner, config, Parallelism(count)) for count in (1, 2))
    gradients = _items(one)["gradients"].by_phase["update"]
    assert "gradient buckets" not in _items(one)
    assert _items(two)["gradient buckets"].by_phase["idle"] == gradients
    assert two.total("update") == one.total("update") + gradients
