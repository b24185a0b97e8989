import re
from pathlib import Path

import pytest

from glm_grpo.analysis.memory import ConfigPlanner, parse_memory
from glm_grpo.analysis.scorer_sizes import scorer_sizes
from glm_grpo.build import model_path
from glm_grpo.cli import main
from glm_grpo.config import compose_config
from glm_grpo.errors import ConfigError
from glm_grpo.report.memory_table import describe_bytes
from rewards.terms_config import LpipsConfig

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def planner():
    return ConfigPlanner(model_path("tiny"), prompt_tokens=64, is_on_accelerator=True)


def _compose(*overrides):
    return compose_config(CONFIGS, "tiny", overrides)


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GB", 24 * 10**9), ("1.5 GiB", 3 * 2**29), ("7b", 7), ("2MB", 2_000_000), ("3KB", 3000)],
)
def test_parse_memory_reads_a_number_and_a_unit(text, size):
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["24", "GB", "-1GB", "0GB", "24 XB", "1e3GB", ""])
def test_parse_memory_refuses_what_is_not_a_size(text):
    with pytest.raises(ConfigError, match=f"--memory {re.escape(repr(text))}.*KiB, MiB, GiB"):
        parse_memory(text)


def test_advise_proposes_changes_that_fit_when_they_are_planned(planner):
    config = _compose()
    memory = planner.plan(config).peak - 10**8
    advice = planner.advise(config, memory)
    assert "train.micro_batch_size=32" in [text for one in advice for text in one.overrides]
    for one in advice:
        planned = planner.plan(_compose(*one.overrides)).peak
        assert planned == one.peak <= memory


def test_advise_joins_changes_where_none_suffices_alone(planner):
    config = _compose()
    alone = planner.plan(_compose("train.micro_batch_size=1")).peak
    (advice,) = planner.advise(config, alone - 10**6)
    assert len(advice.overrides) > 1
    assert planner.plan(_compose(*advice.overrides)).peak == advice.peak < alone


def test_advise_has_none_where_weights_alone_are_too_much(planner):
    assert planner.advise(_compose(), 1000) == []


def test_scorer_sizes_tell_networks_that_move_from_those_that_stay():
    lpips = {"kind": "lpips", "weight": 1.0, "network": "vgg"}
    sizes = scorer_sizes([LpipsConfig(**lpips), LpipsConfig(**lpips, run_in="process")])
    # 14,716,160 weights of 4 bytes.
    assert sizes.movable == sizes.staying == 58_864_640


def test_plan_command_prints_phases_and_refuses_what_does_not_fit(capsys):
    arguments = ["plan", "--config-dir", str(CONFIGS), "--prompt-tokens", "64"]
    main([*arguments, "--memory", "20GB"])
    assert "it fits" in capsys.readouterr().out
    with pytest.raises(SystemExit) as refused:
        main([*arguments, "--memory", "1KB"])
    assert refused.value.code == 1
    assert "more than --memory 1.00 KB" in capsys.readouterr().err
    with pytest.raises(SystemExit) as malformed:
        main([*arguments, "--memory", "lots"])
    assert malformed.value.code == 2


def test_describe_bytes_uses_decimal_units():
    assert [describe_bytes(number) for number in (999, 1500, 24 * 10**9)] == [
        "999 B",
        "1.50 KB",
        "24.00 GB",
    ]
