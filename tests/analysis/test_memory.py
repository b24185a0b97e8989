import json
import shlex
from pathlib import Path

import pytest

from glm_grpo.analysis.memory import ConfigPlanner
from glm_grpo.analysis.scorer_sizes import scorer_sizes
from glm_grpo.build import model_path
from glm_grpo.cli import main
from glm_grpo.config import compose_config
from glm_grpo.report.memory_table import describe_bytes, describe_seconds
from rewards.terms_config import KINDS, OCR_ENGINES, LpipsConfig, TermConfig

CONFIGS = Path(__file__).parents[2] / "configs"


LEAST = (
    "rollout.prompts_per_step=1",
    "rollout.group_size=2",
    "train.micro_batch_size=1",
    "decode.batch_size=1",
    "model.gradient_checkpointing=true",
)
"""A config with few changes left to be tried."""

SHALLOW = {
    "vision_language_encoder": {"text_config": {"num_hidden_layers": 1}},
    "transformer": {"num_layers": 1},
    "vae": {"layers_per_block": 1},
    "text_encoder": {},
}
"""What is changed of the embedded model: a layer of each kind takes the same as any other."""


@pytest.fixture(scope="module")
def shallow_folder(tmp_path_factory):
    """Configs of a model that is planned in no time; no weights."""
    folder = tmp_path_factory.mktemp("shallow")
    for part, changes in SHALLOW.items():
        config = json.loads((Path(model_path("tiny")) / part / "config.json").read_text())
        for key, change in changes.items():
            config[key] = config[key] | change if isinstance(change, dict) else change
        (folder / part).mkdir()
        (folder / part / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def planner(shallow_folder):
    """What it measured for one test serves the next."""
    return ConfigPlanner(str(shallow_folder), prompt_tokens=64, is_on_accelerator=True)


def _compose(*overrides):
    return compose_config(CONFIGS, "tiny", overrides)


def _micro(size):
    return f"train.micro_batch_size={size}"


def test_advise_proposes_changes_that_fit_when_they_are_planned(planner):
    config = _compose()
    half = f"train.micro_batch_size={config.train.micro_batch_size // 2}"
    memory = planner.plan(_compose(half)).peak
    assert memory < planner.plan(config).peak
    advice = planner.advise(config, memory)
    assert half in [text for one in advice for text in one.overrides]
    for one in advice:
        planned = planner.plan(_compose(*shlex.split(" ".join(one.overrides)))).peak
        assert planned == one.peak <= memory


def test_advise_joins_changes_where_none_suffices_alone(planner):
    config = _compose()
    alone = planner.plan(_compose("train.micro_batch_size=1")).peak
    (advice,) = planner.advise(config, alone - 10**6)
    assert len(advice.overrides) > 1
    typed = shlex.split(" ".join(advice.overrides))
    assert planner.plan(_compose(*typed)).peak == advice.peak < alone


def test_advise_draws_fewer_images_at_once_where_decoding_takes_most(planner):
    overrides = ("rollout.prompts_per_step=1", "rollout.group_size=32", "train.micro_batch_size=1")
    config = _compose(*overrides)
    plan = planner.plan(config)
    assert plan.peak_phase == "decode"
    halved = planner.plan(_compose(*overrides, "decode.batch_size=16")).peak
    assert ("decode.batch_size=16",) in [one.overrides for one in planner.advise(config, halved)]


def test_advise_takes_micro_batches_that_divide_nothing(planner):
    # 3 x 3 images: of the sizes 8, 4, 2, 1 only 1 divides 9.
    sizes = ("rollout.prompts_per_step=3", "rollout.group_size=3", "train.micro_batch_size=1000")
    config = _compose(*sizes)
    assert planner.plan(config).peak == planner.plan(_compose(*sizes[:2], _micro(9))).peak
    half = planner.plan(_compose(*sizes[:2], _micro(4))).peak
    assert half < planner.plan(config).peak
    assert (_micro(4),) in [one.overrides for one in planner.advise(config, half)]


def test_advise_relaxes_changes_that_suffice_together(planner):
    recheck = "decode.rollout_steps=1"
    strongest = (
        *("offload=modules_and_optimizer", "train.micro_batch_size=1", "decode.batch_size=1"),
        *("model.gradient_checkpointing=true", "model.dtype=bfloat16"),
        *("model.adapter={rank: 32, alpha: 64.0}", "model.quantization=nf4"),
        *("decode.quantization=float8", "rollout.prompts_per_step=4"),
    )
    memory = planner.plan(_compose(recheck, *strongest)).peak
    (advice,) = planner.advise(_compose(recheck, "rollout.prompts_per_step=64"), memory)
    assert "rollout.prompts_per_step=4" in advice.overrides
    typed = shlex.split(" ".join(advice.overrides))
    assert planner.plan(_compose(recheck, *typed)).peak == advice.peak <= memory


def test_advise_writes_a_section_as_one_word_of_a_shell(planner):
    adapter = "model.adapter={rank: 32, alpha: 64.0}"
    memory = planner.plan(_compose(adapter)).peak
    overrides = [one.overrides for one in planner.advise(_compose(), memory)]
    assert (f"'{adapter}'",) in overrides


def test_advise_offers_no_4_bits_on_the_cpu(shallow_folder):
    planner = ConfigPlanner(str(shallow_folder), prompt_tokens=64, is_on_accelerator=False)
    adapter = "model.adapter={rank: 8, alpha: 8.0}"
    in_8_bits = planner.plan(_compose(adapter, "decode.quantization=float8")).peak
    assert in_8_bits < planner.plan(_compose(adapter)).peak
    offered = [one.overrides for one in planner.advise(_compose(adapter), in_8_bits)]
    # A run there refuses the next step of the same key, model.quantization=nf4.
    assert ("decode.quantization=float8",) in offered
    assert planner.advise(_compose(*LEAST, adapter), 1000) == []


def test_advise_has_none_where_weights_alone_are_too_much(planner):
    assert planner.advise(_compose(*LEAST), 1000) == []


def test_scorer_sizes_tell_networks_that_move_from_those_that_stay():
    lpips = {"kind": "lpips", "weight": 1.0, "network": "vgg"}
    sizes = scorer_sizes([LpipsConfig(**lpips), LpipsConfig(**lpips, run_in="process")])
    # 14,716,160 weights of 4 bytes.
    assert sizes.movable == sizes.staying == 58_864_640


_REQUIRED = {
    "aesthetic": {"head": "head.pth"},
    "vlm_judge": {"url": "http://127.0.0.1:8000/v1", "model": "judge"},
    "remote": {"url": "http://127.0.0.1:8700"},
    "custom": {"function": "module:function"},
}
_WITHOUT_WEIGHTS = {"ssim", "psnr", "vlm_judge", "remote", "custom"}


@pytest.mark.parametrize("kind", [*KINDS, *OCR_ENGINES])
def test_scorer_sizes_know_every_kind_of_term(kind):
    section = {"kind": kind, "weight": 1.0, **_REQUIRED.get(kind, {})}
    if kind in OCR_ENGINES or kind == "ocr":
        engine = kind if kind in OCR_ENGINES else "easyocr"
        term = OCR_ENGINES[engine](**{**section, "kind": "ocr", "engine": engine})
    else:
        term = KINDS[kind](**section)

    sizes = scorer_sizes([term])

    assert (sizes.movable + sizes.on_cpu == 0) == (kind in _WITHOUT_WEIGHTS)


def test_scorer_sizes_refuse_a_kind_they_do_not_know():
    class NewConfig(TermConfig):
        kind: str = "new"

    with pytest.raises(TypeError, match="NewConfig: what a term of this kind holds"):
        scorer_sizes([NewConfig(weight=1.0)])


def test_plan_command_prints_phases_and_refuses_what_does_not_fit(capsys, shallow_folder):
    arguments = ["plan", "--config-dir", str(CONFIGS), "--prompt-tokens", "64"]
    arguments.append(f"model.path={shallow_folder}")
    main([*arguments, "--memory", "20GB", "--device", "h200"])
    printed = capsys.readouterr().out
    assert "it fits" in printed
    assert "a step takes at least" in printed
    assert "on H200 SXM, its phases one after the other: rollout" in printed
    main([*arguments, "--cpu"])
    assert "a step takes" not in capsys.readouterr().out
    with pytest.raises(SystemExit) as refused:
        main([*arguments, *LEAST, "--memory", "1KB"])
    assert refused.value.code == 1
    assert "more than --memory 1.00 KB" in capsys.readouterr().err
    with pytest.raises(SystemExit) as malformed:
        main([*arguments, "--memory", "lots"])
    assert malformed.value.code == 2


def test_describe_seconds_keeps_three_digits():
    seconds = (0.0036875, 0.25, 2.7167, 34.162, 1234.5)
    assert [describe_seconds(number) for number in seconds] == [
        "3.69 ms",
        "250 ms",
        "2.72 s",
        "34.2 s",
        "1234 s",
    ]


def test_describe_bytes_uses_decimal_units():
    assert [describe_bytes(number) for number in (999, 1500, 24 * 10**9)] == [
        "999 B",
        "1.50 KB",
        "24.00 GB",
    ]
