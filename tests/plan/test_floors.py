"""The least time of a step, worked out by hand for a language model of a few entries."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from glm_grpo.models.planning import LanguageShape
from glm_grpo.plan.devices import DEVICES, DeviceSpeed, find_device
from glm_grpo.plan.floors import rollout_floor, rollout_flops, update_flops
from glm_grpo.plan.memory import BatchShape
from tests.factories import tiny_config

LANGUAGE = LanguageShape(
    layers=1,
    width=1,
    mlp_width=1,
    heads=2,
    kv_heads=1,
    head_size=1,
    # 100 entries in the layer, 10 of the head, and 250 in all to read: 1000 bytes in fp32.
    matrices=((10, 10),),
    matrix_names=("proj",),
    layer_vectors=(),
    outside=(150,),
    unread=0,
    drawn=10,
    stored_states=0,
    backward_states=0,
)
# Replayed are the prompt and all tokens but the last: 4 of them.
BATCH = BatchShape(prompts=2, group_size=3, prompt_tokens=2)
PLAIN = ("model.adapter={rank: 1, alpha: 1.0}", "model.gradient_checkpointing=false")


def planner_of(language=LANGUAGE, *, tokens=3):
    return SimpleNamespace(
        language=language,
        rows_per_image=lambda rollout: 1,
        sequence_tokens=lambda config, prompt_tokens: (prompt_tokens, tokens),
    )


def test_token_step_floor_of_the_published_model_is_what_its_weights_take():
    # GLM-Image in bf16 with its embedding: 17.7e9 / 4.8e12.
    published = replace(LANGUAGE, outside=(17_700_000_000 // 4 - 100,))
    floor = rollout_floor(planner_of(published, tokens=1), tiny_config(), BATCH, DEVICES["h200"])
    assert floor == pytest.approx(3.6875e-3)


def test_rollout_floor_reads_weights_once_a_token_and_prompts_once_a_group():
    memory_bound = DeviceSpeed("slow memory", bandwidth=1.0, flops=1e30, link=1.0)
    # Prompts: 1000 bytes. Then two tokens: 1000 each, the 2 x 2 prompt tokens, and 6 samples of 1
    # and 2 tokens: 8 x (4 + 6) and 8 x (4 + 12).
    floor = rollout_floor(planner_of(), tiny_config(), BATCH, memory_bound)
    assert floor == 1000 + 1080 + 1128


def test_rollout_floor_is_that_of_operations_where_they_take_longer():
    compute_bound = DeviceSpeed("slow cores", bandwidth=1e30, flops=1.0, link=1.0)
    # Prompts: 2 x (2 x (100 x 2 + 10) + 4 x 2 x 3 pairs) = 888. Two tokens of 6 samples:
    # 6 x (2 x 110 + 4 x 2 x 3 keys) = 1464, and with 4 keys 1512.
    floor = rollout_floor(planner_of(), tiny_config(), BATCH, compute_bound)
    # Whichever of the two is slower.
    assert floor == rollout_flops(planner_of(), tiny_config(), BATCH) == 888 + 1464 + 1512


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        # Slower than those of the same name.
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA L40", None),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA GeForce RTX 4060 Ti", "rtx4060ti"),
        # Faster ones whose names begin alike.
        ("NVIDIA GeForce RTX 4080 SUPER", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
    ],
)
def test_find_device_knows_the_form_whose_figures_it_has(name, key):
    assert find_device(name) == (None if key is None else DEVICES[key])


@pytest.mark.parametrize(
    ("overrides", "an_image"),
    [
        # Forward, an image: layers 2 x 100 x 4 = 800, head 2 x 10 x 3 = 60, and 4 x 3 / 2 + 4 = 10
        # pairs of attention, 4 x 2 x 10 = 80.
        # The frozen head: forward and slope; trained: forward and two gradients.
        ((), 2 * 800 + 2 * 60 + 3 * 80),
        (("model.adapter=null",), 3 * 800 + 3 * 60 + 3 * 80),
        (("model.gradient_checkpointing=true",), 3 * 800 + 2 * 60 + 4 * 80),
        (("loss.kl_coef=0.1",), 3 * 800 + 3 * 60 + 4 * 80),
        # The reference is run once for all updates.
        (("loss.kl_coef=0.1", "train.epochs_per_rollout=3"), 7 * 800 + 7 * 60 + 10 * 80),
        # Half of the images are seen first by a policy that has moved.
        (("train.minibatches=2",), 2.5 * 800 + 2.5 * 60 + 3.5 * 80),
    ],
    ids=["adapters", "full", "checkpointing", "reference", "three updates", "minibatches"],
)
def test_update_flops_count_every_pass(overrides, an_image):
    config = tiny_config(*PLAIN, "loss.kl_coef=0", "train.epochs_per_rollout=1", *overrides)
    assert update_flops(planner_of(), config, BATCH) == 6 * an_image


def test_float32_has_the_peak_of_its_own_dtype():
    h100 = DEVICES["h100"]
    # 67 and 989.5 TFLOPS.
    assert h100.in_dtype("float32").flops / h100.in_dtype("float16").flops == 67 / 989.5
    assert DeviceSpeed("unknown", bandwidth=1.0, flops=2.0, link=1.0).in_dtype("float32").flops == 2
