"""What several processes hold of a policy, planned and measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from glm_grpo.models.glm_image.planner import (
    PUBLISHED_ID,
    GlmImagePlanner,
    PartConfigs,
    read_part_configs,
)
from glm_grpo.models.memory import (
    ShardBytes,
    UpdateBytes,
    plan_memory,
    shard_bytes,
    trained_bytes,
    update_activations,
    update_on_shards,
)
from glm_grpo.models.planning import BatchSizes, ModelSettings, Parallelism, ScorerSizes
from glm_grpo.tiny.models import PolicySizes, build_policy_model

ROOT = Path(__file__).resolve().parents[3]

FULL = ModelSettings(
    dtype=torch.float32,
    adapter_rank=None,
    is_checkpointing=True,
    needs_reference=False,
    is_on_accelerator=False,
)
SIZES = BatchSizes(
    prompts=2,
    group_size=4,
    height=128,
    width=128,
    prompt_tokens=30,
    micro_batch_size=4,
    is_truncated=False,
)
PUBLISHED = replace(FULL, dtype=torch.bfloat16)


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


def _planned(settings, configs, processes):
    return shard_bytes(GlmImagePlanner(configs).language, settings, processes)


def test_planned_shards_are_those_of_two_processes(measured):
    configs = PartConfigs(build_policy_model(seed=0).config.to_dict(), {}, {}, {})
    shards = _planned(FULL, configs, Parallelism(2, is_sharded=True))
    # The first process has the rows that are left over.
    assert shards.trained == pytest.approx(measured["weights"], rel=0.01)
    assert measured["weights"] == measured["gradients"]
    assert 2 * shards.trained == pytest.approx(measured["moments"], rel=0.01)
    assert shards.whole == measured["put together"]
    backward = update_activations(GlmImagePlanner(configs), FULL, SIZES)
    update = update_on_shards(shards, scoring=0, backward=backward)
    # The gradients of a first micro-batch are there already.
    taken = measured["gradients"] + measured["backward"]
    assert update.total == pytest.approx(taken, rel=0.25)
    assert measured["step"] < measured["backward"]


def test_shards_of_the_published_model_are_parts_of_its_weights():
    configs = read_part_configs(PUBLISHED_ID)
    mixed = _planned(PUBLISHED, configs, Parallelism(8, is_sharded=True, is_mixed=True))
    # Embedding 168,064 x 4,096, head 16,512 x 4,096, last norm 4,096, and in each of 40 layers
    # q 4,096 x 4,096 + 4,096, k and v 256 x 4,096 + 256 each, o 4,096 x 4,096, gate and up
    # 27,392 x 4,096, down 4,096 x 13,696, four norms of 4,096.
    root = 168_064 * 4096 + 16_512 * 4096 + 4096
    layer = 2 * 4096**2 + 4096 + 2 * (256 * 4096 + 256) + 27_392 * 4096 + 4096 * 13_696 + 4 * 4096
    assert (mixed.root, mixed.layer) == (2 * root, 2 * layer)
    assert mixed.whole == 2 * (root + 40 * layer) == 17_829_576_704
    assert mixed.trained == mixed.whole * 2 // 8
    assert mixed.upcast == 2 * mixed.whole
    in_bf16 = _planned(PUBLISHED, configs, Parallelism(8, is_sharded=True))
    assert in_bf16.trained == in_bf16.whole // 8
    assert in_bf16.upcast == in_bf16.whole


def test_shards_of_frozen_weights_keep_their_type_and_adapters_are_fp32(shallow_configs):
    settings = replace(FULL, dtype=torch.bfloat16, adapter_rank=4)
    shards = _planned(settings, shallow_configs, Parallelism(2, is_sharded=True, is_mixed=True))
    language = GlmImagePlanner(shallow_configs).language
    in_bf16 = trained_bytes(language, replace(settings, adapter_rank=None))
    assert shards.frozen == in_bf16 // 2
    assert shards.trained == trained_bytes(language, settings) // 2


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
    model = replace(FULL, needs_reference=True, is_on_accelerator=True)
    processes = Parallelism(2, is_sharded=True)
    plan = plan_memory(planner, model, SIZES, ScorerSizes(), "modules", processes=processes)
    shards = _planned(FULL, shallow_configs, processes)
    items = _items(plan)
    assert items["policy, own shards"].by_phase["idle"] == shards.trained
    assert items["optimizer state"].by_phase["idle"] == 2 * shards.trained
    together = items["policy, put together"].by_phase
    assert together["rollout"] == together["decode"] == together["reward"] == shards.whole
    assert "idle" not in together
    # Not cut, and on the accelerator in the update alone.
    assert items["reference copy"].by_phase.keys() == {"update"}
    assert items["reference copy"].by_phase["update"] >= shards.whole
    assert "language model and head" not in items
    alone = _items(plan_memory(planner, model, SIZES, ScorerSizes(), "modules"))
    assert items["decoder"] == alone["decoder"]


def test_plan_of_shards_counts_fp32_copies_in_cpu_memory_before_they_are_cut(shallow_configs):
    # A policy that is larger than its decoder.
    wide = PolicySizes(hidden_size=512, intermediate_size=2048, heads=16, key_value_heads=16)
    parts = replace(
        shallow_configs, language=build_policy_model(seed=0, sizes=wide).config.to_dict()
    )
    planner = GlmImagePlanner(parts)
    model = replace(FULL, dtype=torch.bfloat16, is_on_accelerator=True)
    sharded = Parallelism(2, is_sharded=True)
    plain, mixed = (
        plan_memory(planner, model, SIZES, ScorerSizes(), "modules", processes=processes)
        for processes in (sharded, replace(sharded, is_mixed=True))
    )
    waiting = sum(item.cpu for item in mixed.items if item.name in ("decoder", "scorers"))
    vision = _items(mixed)["vision tower and VQ"].cpu
    upcast = _planned(model, parts, replace(sharded, is_mixed=True)).upcast
    assert mixed.cpu_at_start == vision + waiting + upcast > plain.cpu_at_start


def test_plan_of_copies_adds_the_buckets_of_their_gradients(planner):
    model = replace(FULL, adapter_rank=4)
    one, two = (
        plan_memory(planner, model, SIZES, ScorerSizes(), "none", processes=Parallelism(count))
        for count in (1, 2)
    )
    gradients = _items(one)["gradients"].by_phase["update"]
    assert "gradient buckets" not in _items(one)
    assert _items(two)["gradient buckets"].by_phase["idle"] == gradients
    assert two.total("update") == one.total("update") + gradients
