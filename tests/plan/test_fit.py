import json
import re
import shlex
from pathlib import Path
from typing import Literal

import pytest
import torch

from glm_grpo.cli import main
from glm_grpo.commands.plan import describe_seconds, floor_lines
from glm_grpo.config import compose_config, to_yaml
from glm_grpo.models.find import FoundModel, find_model
from glm_grpo.output import describe_bytes
from glm_grpo.plan.fit import ConfigPlanner, MemoryAdvice
from glm_grpo.plan.floors import PhaseFloor
from glm_grpo.plan.scorers import scorer_sizes
from rewards.base import TermConfig
from rewards.build import build_scorer
from rewards.config import RewardConfig
from rewards.terms import KINDS
from rewards.terms.lpips import LpipsConfig
from rewards.terms.ocr import OCR_ENGINES
from rewards.types import Prompt
from tests.factories import REQUIRED_OPTIONS
from tests.plan.simple_planner import SimplePlanner

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
        config = json.loads((Path(find_model("tiny").path) / part / "config.json").read_text())
        for key, change in changes.items():
            config[key] = config[key] | change if isinstance(change, dict) else change
        (folder / part).mkdir()
        (folder / part / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def planner():
    return ConfigPlanner(SimplePlanner(), prompt_tokens=64, is_on_accelerator=True)


def _compose(*overrides):
    return compose_config(CONFIGS, "tiny", overrides)


def _micro(size):
    return f"train.micro_batch_size={size}"


def test_advise_takes_the_first_remedy_that_suffices(planner):
    config = _compose()
    half = f"train.micro_batch_size={config.train.micro_batch_size // 2}"
    memory = planner.plan(_compose(half)).peak
    assert memory < planner.plan(config).peak
    assert planner.advise(config, memory) == MemoryAdvice((half,), memory)


def test_advise_joins_changes_where_none_suffices_alone(planner):
    config = _compose()
    alone = planner.plan(_compose("train.micro_batch_size=1")).peak
    advice = planner.advise(config, alone - 1)
    assert len(advice.overrides) > 1
    typed = shlex.split(" ".join(advice.overrides))
    assert planner.plan(_compose(*typed)).peak == advice.peak < alone


def test_advise_takes_what_helps_one_phase_while_another_takes_more(planner):
    # The update takes most, decoding more than there is as well.
    sizes = ("rollout.prompts_per_step=1", "rollout.group_size=32")
    config = _compose(*sizes, "train.micro_batch_size=32")
    strongest = ("train.micro_batch_size=1", "decode.batch_size=1", "offload=modules_and_optimizer")
    memory = planner.plan(_compose(*sizes, *strongest)).peak
    plan = planner.plan(config)
    assert plan.total("update") > plan.total("decode") > memory
    advice = planner.advise(config, memory)
    keys = {text.partition("=")[0] for text in advice.overrides}
    assert {"train.micro_batch_size", "decode.batch_size"} <= keys
    assert advice.peak <= memory


def test_advise_takes_micro_batches_that_divide_nothing(planner):
    # 3 x 3 images: of the sizes 8, 4, 2, 1 only 1 divides 9.
    sizes = ("rollout.prompts_per_step=3", "rollout.group_size=3", "train.micro_batch_size=1000")
    offload = "offload=modules_and_optimizer"
    config = _compose(*sizes, offload)
    assert planner.plan(config).peak == planner.plan(_compose(*sizes[:2], _micro(9), offload)).peak
    half = planner.plan(_compose(*sizes[:2], _micro(4), offload)).peak
    assert half < planner.plan(config).peak
    assert planner.advise(config, half).overrides == (_micro(4),)


def test_advise_changes_what_is_learned_last(planner):
    recheck = "decode.rollout_steps=1"
    strongest = (
        *("offload=modules_and_optimizer", "train.micro_batch_size=1", "decode.batch_size=1"),
        *("model.gradient_checkpointing=true", "model.dtype=bfloat16"),
        *("model.adapter={rank: 8, alpha: 64.0}", "model.quantization=nf4"),
        *("decode.quantization=float8", "rollout.prompts_per_step=4"),
    )
    memory = planner.plan(_compose(recheck, *strongest)).peak
    advice = planner.advise(_compose(recheck, "rollout.prompts_per_step=64"), memory)
    assert "rollout.prompts_per_step=4" in advice.overrides
    assert not any("group_size" in text for text in advice.overrides)
    typed = shlex.split(" ".join(advice.overrides))
    assert planner.plan(_compose(recheck, *typed)).peak == advice.peak <= memory


def test_advise_writes_a_section_as_one_word_of_a_shell(planner):
    adapter = "model.adapter={rank: 32, alpha: 64.0}"
    least = (*LEAST, "offload=modules_and_optimizer", "decode.quantization=float8")
    memory = planner.plan(_compose(*least, adapter)).peak
    assert planner.advise(_compose(*least), memory).overrides == (f"'{adapter}'",)


def test_advise_lowers_the_rank_of_an_adapter_and_keeps_its_layers(planner):
    least = (*LEAST, "offload=modules_and_optimizer", "decode.quantization=float8")
    adapter = "model.adapter={rank: 800, alpha: 8.0, target_modules: [q_proj]}"
    memory = planner.plan(_compose(*least, adapter.replace("800", "32"))).peak
    overrides = planner.advise(_compose(*least, adapter), memory).overrides
    assert overrides == ("model.adapter.rank=32",)
    changed = _compose(*least, adapter, *overrides).model.adapter
    assert (changed.rank, changed.alpha, changed.target_modules) == (32, 8.0, ("q_proj",))


def test_advise_offers_no_4_bits_on_the_cpu():
    planner = ConfigPlanner(SimplePlanner(), prompt_tokens=64, is_on_accelerator=False)
    adapter = "model.adapter={rank: 8, alpha: 8.0}"
    in_8_bits = planner.plan(_compose(*LEAST, adapter, "decode.quantization=float8")).peak
    assert in_8_bits < planner.plan(_compose(*LEAST, adapter)).peak
    # A run there refuses model.quantization=nf4.
    offered = planner.advise(_compose(*LEAST, adapter), in_8_bits).overrides
    assert offered == ("decode.quantization=float8",)
    # Where weights alone are too much, nothing makes it fit.
    advice = planner.advise(_compose(*LEAST, adapter), 1000)
    assert advice.overrides == ()
    assert "it fits" not in advice.describe(1000)


def test_scorer_sizes_are_those_of_the_networks():
    lpips = {"kind": "lpips", "weight": 1.0, "network": "vgg"}
    # 14,716,160 weights of 4 bytes.
    assert scorer_sizes([LpipsConfig(**lpips)]).movable == 58_864_640


_WITHOUT_WEIGHTS = {"ssim", "psnr", "vlm_judge", "remote", "custom"}


@pytest.mark.parametrize("kind", [*KINDS, *OCR_ENGINES])
def test_scorer_sizes_know_every_kind_of_term(kind):
    section = {"kind": kind, "weight": 1.0, **REQUIRED_OPTIONS.get(kind, {})}
    if kind in OCR_ENGINES or kind == "ocr":
        engine = kind if kind in OCR_ENGINES else "easyocr"
        term = OCR_ENGINES[engine](**{**section, "kind": "ocr", "engine": engine})
    else:
        term = KINDS[kind](**section)

    sizes = scorer_sizes([term])

    assert (sizes.movable + sizes.on_cpu == 0) == (kind in _WITHOUT_WEIGHTS)


class MeanConfig(TermConfig):
    """A kind of term in one file: mean brightness of an image."""

    compares_with = ("prompt",)
    kind: Literal["mean"]
    divisor: float = 255.0

    def build(self, device):
        return MeanReward(self.divisor)

    def memory_bytes(self):
        return 123


class MeanReward:
    def __init__(self, divisor):
        self._divisor = divisor

    def applies_to(self, prompt):
        return True

    def score(self, prompts, pixels):
        return pixels.float().mean(dim=(1, 2, 3)) / self._divisor

    def modules(self):
        return ()


def test_a_kind_of_term_is_one_file_and_a_line_in_the_registry(monkeypatch):
    monkeypatch.setitem(KINDS, "mean", MeanConfig)
    section = {"terms": {"mean": {"weight": 1.0, "divisor": 510.0}}}
    config = RewardConfig.model_validate(section)
    scorer = build_scorer(config, torch.device("cpu"))
    pixels = torch.full((1, 2, 3, 4, 4), 255, dtype=torch.uint8)
    assert scorer.score([Prompt("a", "white")], pixels).raw.tolist() == [[[0.5], [0.5]]]
    assert scorer_sizes(config.terms.values()).movable == 123


def test_plan_command_prints_phases_and_floors_of_a_step(
    capsys, shallow_folder, monkeypatch, tmp_path
):
    # What it measured for one command serves the next.
    of_model = find_model(str(shallow_folder)).planner()
    monkeypatch.setattr(FoundModel, "planner", lambda _: of_model)
    arguments = ["plan", "--config-dir", str(CONFIGS), "--prompt-tokens", "64", "--device", "h200"]
    main([*arguments, "--memory", "20GB"])
    printed = capsys.readouterr().out
    assert "it fits" in printed
    assert "…" not in printed, "a word of the table is cut at 80 characters"
    assert re.search("on H200 SXM, .*: rollout", printed)
    floor = _floor_of_decode(printed)
    main([*arguments, "train.method=sft", "rollout.width=96"])
    printed = capsys.readouterr().out
    # A step of supervised fine-tuning has no other phase.
    assert re.search("on H200 SXM, .*: update [^,]*$", printed, re.MULTILINE)
    # A hint at the size.
    assert "128 x 128" in printed
    # A run of 8 images instead of the 64 of the config at hand.
    sizes = ["rollout.prompts_per_step=2", "rollout.group_size=4"]
    config = compose_config(CONFIGS, "tiny", sizes)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    times = {f"time/{name}": 1.0 for name in ("rollout", "decode", "update")}
    rows = [json.dumps({"step": step, "time/step": 4.0, **times}) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows))
    main(["plan", "--measured", str(tmp_path), "--device", "h200"])
    printed = capsys.readouterr().out
    assert re.search(r"decode +│ +[\d.]+ ms │ +1 s │", printed)
    assert 8 * _floor_of_decode(printed) == pytest.approx(floor, rel=0.01)


def _floor_of_decode(printed):
    return float(re.search(r"decode ([\d.]+) ms", printed)[1])


def test_plan_command_refuses_what_does_not_fit(capsys, monkeypatch):
    monkeypatch.setattr(FoundModel, "planner", lambda _: SimplePlanner())
    with pytest.raises(SystemExit) as refused:
        main(["plan", "--config-dir", str(CONFIGS), "--cpu", "--memory", "1KB"])
    assert refused.value.code == 1
    assert "more than 1.00 KB" in capsys.readouterr().err


def test_floor_of_a_step_whose_collectors_work_beside_the_learner():
    # Two collectors share 5 s of collecting; the learner takes 2 s.
    seconds = {"rollout": 4.0, "decode": 1.0, "update": 2.0}
    floors = {phase: PhaseFloor(each) for phase, each in seconds.items()}
    (line,) = floor_lines(floors, device="H200", collectors=2)
    assert re.search(r"2\.5 s on H200, 2 collectors", line)


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
