"""What `check`, `train` and `probe` say and refuse around a run."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
import transformers

from glm_grpo.commands.check import (
    check_config,
    describe_average,
    describe_credit,
    hint_at_boxes,
)
from glm_grpo.commands.train import _why_it_ends, run_training
from glm_grpo.config import Config, compose_config
from glm_grpo.data.prompts import PromptSource
from glm_grpo.errors import ConfigError, DataError, MemoryLimitError, ModelError
from glm_grpo.models.find import FoundModel, find_model
from glm_grpo.models.glm_image.loading import load_pipeline
from glm_grpo.models.glm_image.prompt_inputs import encode_prompts, longest_prompt_tokens
from glm_grpo.models.planning import UNDIVIDED, Planner
from glm_grpo.plan.fit import ConfigPlanner, MemoryAdvice
from glm_grpo.setup import memory as run_memory
from glm_grpo.setup.hints import (
    hint_at_credit,
    hint_at_length,
    hint_at_prompts,
    hint_at_tags,
    list_asked,
)
from glm_grpo.setup.prepared_run import prepare
from glm_grpo.setup.rewards import check_metadata, check_used
from glm_grpo.tiny.world import CAPTION_FORM
from rewards.score_map import ScoreBox
from rewards.types import RewardError, RewardTable
from tests.factories import tiny_config
from tests.opened import prompts_of

LEAST = (
    "rollout.prompts_per_step=1",
    "rollout.group_size=2",
    "train.micro_batch_size=2",
    "decode.batch_size=1",
)


VERDICT = "+reward.terms.composition={weight: 1, score: verdict}"
LEFT_OUT = ("lpips=null", "ssim=null")
OF_OBJECTS = (
    "+reward.terms.mine={kind: custom, weight: 1, function: 'a:b', needs_of_prompt: [objects]}"
)


@pytest.fixture
def config(tmp_path: Path, configs_dir: Path) -> Config:
    return compose_config(configs_dir, "tiny", [*LEAST, f"run_dir={tmp_path / 'run'}"])


@pytest.fixture(scope="module")
def planner() -> Planner:
    """The embedded model's, which keeps what it has planned."""
    return find_model("tiny").planner()


@pytest.fixture
def give_memory(monkeypatch: pytest.MonkeyPatch, planner: Planner) -> Callable[[int | None], None]:
    """Makes the machine one of so many bytes, for which no advice is known."""

    def give(size: int | None) -> None:
        monkeypatch.setattr(run_memory, "available_memory", lambda _: size)

    monkeypatch.setattr(FoundModel, "known_planner", lambda _: planner)
    # Found in tests/plan/test_fit.py; takes ten plans.
    advice = MemoryAdvice(("offload=modules",), 0)
    monkeypatch.setattr(ConfigPlanner, "advise", lambda *_: advice)
    return give


def _planned_peak(config: Config, planner: Planner) -> int:
    captions = [text for source in _prompt_sources(config) for text in source.captions()]
    tokens = planner.longest_prompt_tokens(captions, height=128, width=128)
    assert tokens is not None
    of_configs = ConfigPlanner(planner, prompt_tokens=tokens, is_on_accelerator=False)
    return of_configs.plan(config).peak


def _prompt_sources(config: Config) -> list[PromptSource]:
    prompts = prompts_of(config)
    return [prompts.training, prompts.held_out]


def test_run_training_refuses_what_cannot_fit_before_there_is_a_run_folder(
    config: Config, give_memory: Callable[[int | None], None], tmp_path: Path
) -> None:
    give_memory(1_000_000)
    said = r"(?s)1\.00 MB .*CPU memory \(rollout.*offload=modules"
    with pytest.raises(MemoryLimitError, match=said):
        run_training(config)
    assert not (tmp_path / "run").exists()


def test_check_passes_a_supervised_run_whose_config_has_a_kl(configs_dir: Path) -> None:
    changes = ["train.method=sft", "loss.kl_coef=0.01"]
    *_, last = check_config(compose_config(configs_dir, "tiny", [*LEAST, *changes]))
    assert last.startswith("self-check: ")


def test_check_describes_how_far_the_exported_average_is_behind() -> None:
    said = describe_average(0.999, 20)
    assert re.search(r"eval\.ema_decay = 0\.999 .* 2\.0 steps .* 90 %", said)


def test_check_describes_which_terms_say_where_they_were_earned() -> None:
    table = RewardTable(
        names=("ssim", "aesthetic", "ocr", "watched"),
        raw=torch.tensor([[[1.0, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]]),
        is_applicable=torch.tensor([[True, True, False, True]]),
        weights=torch.tensor([0.5, 1.0, 1.0, 0.0]),
        std_floors=torch.full((4,), 1e-4),
    )
    assert "by place for" not in describe_credit(table, "weighted_sum")
    parts = torch.tensor([[[[1.0, 0.0]], [[0.0, 0.0]]]])
    placed = replace(table, score_map={"ssim": parts, "ocr": torch.zeros(1, 2, 1, 2)})
    # The two that apply differ by 0.5 each, and one of them has places.
    said = describe_credit(placed, "weighted_sum")
    assert re.fullmatch("by place for ssim, 50 % .*; .*image for aesthetic", said)


def test_check_says_that_boxes_need_a_layout_that_the_prompt_fixes() -> None:
    table = RewardTable(
        names=("ssim", "ocr", "watched"),
        raw=torch.zeros(1, 2, 3),
        is_applicable=torch.ones(1, 3, dtype=torch.bool),
        weights=torch.tensor([0.5, 0.5, 0.0]),
        std_floors=torch.full((3,), 1e-4),
        score_map={name: torch.zeros(1, 2, 1, 2) for name in ("ssim", "ocr", "watched")},
    )
    assert hint_at_boxes(table) == []
    boxes = (((ScoreBox(0.5, 0.0, 0.0, 8.0, 8.0, "A"),), ()),)
    (found,) = hint_at_boxes(replace(table, score_boxes={"ocr": boxes, "watched": boxes}))
    assert found.startswith("boxes of ocr ")
    assert hint_at_boxes(replace(table, score_boxes={"ocr": ((),), "watched": boxes})) == []
    letters = (((ScoreBox(0.5, 0.0, 0.0, 8.0, 8.0, "A", kind="a:0"),), ()),)
    assert hint_at_boxes(replace(table, score_boxes={"ocr": letters})) == []
    shown = (((ScoreBox(0.0, 0.0, 0.0, 8.0, 8.0, "what earned nothing"),), ()),)
    assert hint_at_boxes(replace(table, score_boxes={"ocr": shown})) == []


def test_check_hints_at_credit_by_place_that_has_no_effect(configs_dir: Path) -> None:
    terms = "reward.terms"
    untied = "reward.allow_image_only=true"
    unplaced = [f"{terms}.lpips.weight=0", f"{terms}.ssim.weight=0", f"~{terms}.ocr", untied]
    for overrides, is_hinted in (
        (["advantage.credit=place", *unplaced], True),
        (["advantage.credit=place", *unplaced[1:]], False),
        (["advantage.credit=image", *unplaced], False),
        (["advantage.credit=place", *unplaced, f"+{terms}.composition.weight=1"], False),
        (["advantage.credit=place", *unplaced, VERDICT], True),
    ):
        found = hint_at_credit(compose_config(configs_dir, "tiny", overrides))
        assert bool(found) == is_hinted


def test_check_fit_warns_where_a_plan_is_too_uncertain_to_refuse(
    config: Config,
    planner: Planner,
    give_memory: Callable[[int | None], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="glm_grpo")
    peak = _planned_peak(config, planner)
    sources, device = _prompt_sources(config), torch.device("cpu")
    for memory, is_warned in ((peak, False), (math.ceil(0.95 * peak), True)):
        give_memory(memory)
        found = run_memory.check_fit(config, planner, sources, device, UNDIVIDED)
        assert "in CPU memory" in found
        warned = [record for record in caplog.records if record.levelname == "WARNING"]
        assert bool(warned) == is_warned


def test_longest_prompt_is_counted_by_the_models_own_processor(config: Config) -> None:
    # As the policy encodes it: with the chat template and the sizes of both grids.
    short, long = ("A", "A circle"), ("A", "A circle of sorrow, much longer than the other one")
    counts = [
        longest_prompt_tokens(find_model("tiny").path, captions, height=128, width=128)
        for captions in (short, long)
    ]
    pipeline = load_pipeline(find_model("tiny").path, dtype=torch.float32)
    encoded = encode_prompts(
        pipeline.vision_language_encoder, pipeline.processor, long, height=128, width=128
    )
    assert counts[1] == encoded.input_ids.shape[1] > counts[0]


@pytest.mark.usefixtures("unloadable_model")
def test_run_training_says_where_it_writes_before_a_model_is_loaded(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="glm_grpo")
    resumed = config.model_copy(
        update={"train": config.train.model_copy(update={"resume": "auto"})}
    )
    for each in (config, resumed):
        with pytest.raises(ModelError):
            run_training(each)
    said = [message for message in caplog.messages if f" {tmp_path / 'run'} " in message]
    # The second time, the run is continued.
    assert len(said) == 3


def test_run_training_leaves_nothing_behind_where_the_model_cannot_be_used(
    tmp_path: Path, configs_dir: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(find_model("tiny").path, model)
    (model / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"")
    overrides = [f"run_dir={tmp_path / 'run'}", f"model.path={model}"]
    with pytest.raises(ModelError, match="vae/diffusion_pytorch_model.safetensors"):
        run_training(compose_config(configs_dir, "tiny", overrides))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["rollout.prompts_per_step=2"], "processes: 1 to 2$"),
        pytest.param(
            ["rollout.prompts_per_step=2", "train.mode=async"],
            "processes: 1$",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("ray") is None, reason="Ray is not installed"
            ),
        ),
        (
            ["model.adapter=null", "model.dtype=bfloat16"],
            "processes: .*model.dtype is bfloat16",
        ),
    ],
)
def test_check_config_says_how_many_processes_can_run_it(
    changes: list[str], expected: str, configs_dir: Path
) -> None:
    lines = check_config(compose_config(configs_dir, "tiny", [*LEAST, *changes]))
    next(lines)
    assert re.match(expected, next(lines))


WITHOUT_TARGETS = (
    "rollout.height=64",
    "rollout.width=64",
    "decode.steps=1",
    "eval.samples_per_prompt=1",
    "reward.combine=normalize_then_sum",
    *("lpips=0", "ssim=0"),
)


@pytest.fixture
def unloadable_model(
    give_memory: Callable[[int | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuses to load any model, on a machine of unknown memory."""

    def refuse(*_: object, **__: object) -> None:
        raise ModelError("not loaded")

    monkeypatch.setattr("glm_grpo.setup.prepared_run.load_models", refuse)
    give_memory(None)


@pytest.fixture
def without_targets(tmp_path: Path, configs_dir: Path) -> Config:
    """Three prompts of which one has a text; LPIPS and SSIM, of weight 0, apply to none."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('a red sign\na sign that says "GO"\na blue sign\n')
    data = (f"data.path={prompts}", f"data.eval_path={prompts}")
    run = ("train.steps=1", "trackers=[]", f"run_dir={tmp_path / 'run'}", "optim.warmup_steps=0")
    return compose_config(configs_dir, "tiny", [*LEAST, *WITHOUT_TARGETS, *data, *run])


HINTS = (
    "3 training and 3 held-out prompts",
    *(
        line
        for of in ("training", "held-out")
        for line in (
            f"1 of 3 {of} prompts .*: 00001 'GO'",
            f"2 of 3 {of} prompts ask for no text \\(00000, 00002\\): ocr does not score them$",
        )
    ),
    "rollout.height=64 rollout.width=64: .*128 x 128.* 128 pixels",
    *(
        f"3 of 3 {of} prompts .* {re.escape(CAPTION_FORM)} .*: 00000, 00001, 00002"
        for of in ("training", "held-out")
    ),
    "3 of 3 held-out prompts .*trained on: 00000, 00001, 00002",
)
RARE = [
    rf"ocr \(75% .* 1 of the 3 {of} prompts; .*00000 \('a red sign'\), 00002 \('a blue sign'\)"
    for of in ("training", "held-out")
]


def _enable_bars() -> None:
    """As they are in a process that begins."""
    diffusers.utils.logging.enable_progress_bar()
    transformers.utils.logging.enable_progress_bar()


def test_check_config_names_terms_that_apply_to_few_and_scores_a_held_out_prompt(
    without_targets: Config,
    capfd: pytest.CaptureFixture[str],
    small_preview: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _enable_bars()
    hints = "glm_grpo.commands.check.hint_at_trackers"
    monkeypatch.setattr(hints, lambda names: [f"no key for {len(names)}"])
    found = dict(line.split(": ", maxsplit=1) for line in check_config(without_targets))
    assert found["trackers"] == "\n    no key for 0"
    first, *rare = found["reward"].split("\n    ")
    assert first.startswith("lpips 0, ssim 0, ocr 0.3, aesthetic 0.1; ")
    for lines, expected in ((found["data"].split("\n    "), HINTS), (rare, RARE)):
        for line, said in zip(lines, expected, strict=True):
            assert re.match(said, line)
    for part in ("one rollout", "one held-out prompt"):
        assert found[part].startswith("lpips does not apply, ssim does not apply, ocr ")
    # The first held-out prompt asks for no text.
    assert "ocr does not apply" in found["one held-out prompt"]
    # No bar of a library's.
    assert "Loading" not in capfd.readouterr().err


def test_prompts_are_described_though_the_model_is_missing(
    tmp_path: Path, configs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:
        raise ConfigError(f"{path} is not here")

    monkeypatch.setattr("glm_grpo.models.glm_image.family.check_model", refuse)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('a 12" record "JAZZ"\n' + "a cat\n" * 3)
    data = (f"data.path={prompts}", f"data.eval_path={prompts}", "lpips=null", "ssim=null")
    found = check_config(compose_config(configs_dir, "glm_image_80gb", [*data, "aesthetic=null"]))
    lines = []
    with pytest.raises(ConfigError, match="zai-org/GLM-Image is not here"):
        lines.extend(found)
    *_, data_line = lines
    first, *hints = data_line.split("\n    ")
    assert first == "data: 4 training and 4 held-out prompts"
    assert hints[1].endswith("no text (00001, 00002, 00003): ocr does not score them")
    # Which needs the family of the model, and none of its files.
    assert "the model reads other texts than the quoted ones: 00000 'record'" in hints[4]


def test_model_prompts_and_terms_are_refused_together(tmp_path: Path, configs_dir: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red sign\n")
    overrides = [
        *(f"data.path={prompts}", f"data.eval_path={prompts}", f"model.path={tmp_path / 'none'}"),
        "reward.terms.aesthetic.head=none.pth",
        "+reward.terms.mine={kind: custom, weight: 0, function: 'no_such_module:f'}",
    ]
    with pytest.raises(ConfigError, match="^4 checks failed:") as refused:
        list(check_config(compose_config(configs_dir, "tiny", [*LEAST, *overrides])))
    for said in (
        f"model.path is '{tmp_path / 'none'}'",
        "reward.terms: 90% ",
        "'none.pth'.* https://github.com/christophschuhmann/",
        "no_such_module ",
    ):
        assert re.search(said, str(refused.value))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            (),
            "60% of the weight .* 2 training prompts .lpips and ssim: .*`target`",
        ),
        ((), "lpips=null ssim=null$"),
        (("~reward.terms.ocr",), "lpips=null ssim=null .*reward.terms.clip_score.weight=0.5"),
        (("~reward.terms.ocr", "reward.allow_image_only=true"), "lpips=null ssim=null$"),
        (("reward.terms.lpips.against=source", "ssim=0"), "data.sources is 0"),
        ((*LEFT_OUT, "+reward.terms.ocr.prompt_ids=b*"), "ocr: .*`text`"),
        ((*LEFT_OUT, "+reward.terms.ocr.prompt_ids=x*"), r"ocr: .*`prompt_ids`, 'x\*'"),
        ((*LEFT_OUT, OF_OBJECTS), "mine: none asks for objects, by the field `include`"),
        (LEFT_OUT, None),
        (("lpips=0", "ssim=0", "+reward.terms.ocr.prompt_ids=a*"), None),
        (("train.resume=auto",), None),
        (("train.method=sft",), None),
    ],
)
def test_terms_that_apply_to_no_training_prompt_are_refused(
    tmp_path: Path, configs_dir: Path, overrides: tuple[str, ...], said: str | None
) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = ({"prompt": 'a sign "GO"', "id": "a1"}, {"prompt": "a cat", "id": "b1"})
    path.write_text("\n".join(map(json.dumps, rows)))
    data = (f"data.path={path}", "data.eval_path=tiny:heldout")
    config = compose_config(configs_dir, "tiny", [*LEAST, *data, *overrides])
    prompts = prompts_of(config)
    if said is None:
        check_used(config, prompts)
    else:
        with pytest.raises(ConfigError, match=said):
            check_used(config, prompts)


@pytest.mark.parametrize(
    ("name", "height", "width", "expected"),
    [
        ("glm_image_80gb", 1024, 1024, None),
        ("glm_image_80gb", 512, 512, "1024 x 1024"),
        ("glm_image_80gb", 992, 2048, "1024 pixels"),
        ("glm_image_80gb", 2048, 2048, None),
        ("glm_image_80gb", 2048, 2080, r"4,194,304 pixels, .* \(2048 x 2048\)"),
        ("tiny", 128, 128, None),
        ("tiny", 128, 96, "128 pixels"),
    ],
)
def test_sizes_that_a_model_was_not_trained_for_are_named(
    configs_dir: Path, name: str, height: int, width: int, expected: str | None
) -> None:
    size = (f"rollout.height={height}", f"rollout.width={width}")
    data = ("data.path=a.txt", "data.eval_path=b.txt")
    config = compose_config(configs_dir, name, [*size, *data])
    model = find_model(config.model.path)
    lines = model.family.hint_at_size(model.path, config)
    assert len(lines) == (expected is not None)
    assert re.search(expected or "", "".join(lines))


@pytest.mark.parametrize(
    ("lengths", "named"),
    [
        # Usual are 256 tokens of 4 bytes; far is 4 times that, or as much as the median.
        ([40, 40, 1024, 40], []),
        ([40, 40, 1025, 40], ["00002 (1,025 bytes)"]),
        ([700, 700, 2800, 700], []),
        ([700, 700, 2801, 700], ["00002 (2,801 bytes)"]),
        ([4096, 4096, 4097], ["00002 (4,097 bytes)"]),
        ([9000] * 4, [*(f"0000{row} (9,000 bytes)" for row in range(3)), "..."]),
    ],
)
def test_prompts_that_are_far_longer_are_named(
    tmp_path: Path, configs_dir: Path, planner: Planner, lengths: list[int], named: list[str]
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"{'x' * length}\n" for length in lengths))
    data = (f"data.path={path}", "data.eval_path=tiny:heldout")
    lines = hint_at_length(
        prompts_of(compose_config(configs_dir, "tiny", [*LEAST, *data])), planner
    )
    assert len(lines) == bool(named)
    for line in lines:
        assert line.startswith(f"{lengths.count(max(lengths))} of {len(lengths)} training prompts")
        assert f": {', '.join(named)};" in line


def test_a_column_that_no_held_out_prompt_has_is_refused(tmp_path: Path, configs_dir: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "category": "b"}\n')
    data = ("data.path=tiny:train", f"data.eval_path={path}")
    known = compose_config(configs_dir, "tiny", [*LEAST, *data, "eval.group_by=category"])
    assert len(prompts_of(known).held_out) == 1
    other = compose_config(configs_dir, "tiny", [*LEAST, *data, "eval.group_by=categories"])
    with pytest.raises(
        ConfigError, match=r"(?s)eval.group_by = 'categories'.*name one of category"
    ):
        prompts_of(other)


@pytest.mark.parametrize("reward", ["ocr", "aesthetic"])
def test_texts_are_listed_with_what_the_glyph_encoder_reads_instead(
    tmp_path: Path, configs_dir: Path, reward: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    rows: list[dict[str, object]] = [
        {"prompt": "a dog's collar with 'REX' on it"},
        {"prompt": "a sign \u201eHALT\u201c", "text": ["GO", "AWAY"]},
        {"prompt": 'a "SIGN" whose "SIGN" glows'},
        {"prompt": "a cat"},
        {"prompt": "two", "text": "x" * 500},
        {"prompt": 'a 12" record "JAZZ"'},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    data = [f"data.path={path}", f"data.eval_path={path}", "reward.allow_image_only=true"]
    unused = [f"~reward.terms.{name}" for name in ("lpips", "ssim", "ocr", "aesthetic")]
    unused.remove(f"~reward.terms.{reward}")
    config = compose_config(configs_dir, "tiny", [*LEAST, *data, *unused])
    prompts = prompts_of(config)
    # Whatever is rewarded, the decoder reads the prompt.
    rule = find_model(config.model.path).family.TEXT_RULE
    said, _ = [line for line in hint_at_prompts(config, prompts, rule) if "other texts" in line]
    assert said.startswith("in 3 of 6 training prompts ")
    wrong = "00000 's collar with' for 'REX', 00001 nothing for 'HALT', 00005 'record' for 'JAZZ';"
    assert wrong in said
    listed = list_asked(config, prompts)
    assert bool(listed) == (reward == "ocr")
    if listed:
        assert listed[0].startswith("5 of 6 training prompts ")
        assert listed[0].endswith(": 00000 'REX', 00001 'GO' and 'AWAY', 00002 'SIGN', ...")
        without = "1 of 6 training prompts asks for no text (00003): ocr does not score it"
        assert listed[1] == without


@pytest.mark.parametrize(
    ("options", "overrides", "is_refused"),
    [
        ("weight: 1", (), True),
        ("weight: 1, prompt_ids: 'a*'", (), False),
        ("weight: 0, when: evaluation", (), False),
        ("weight: 1", ("train.method=sft",), False),
    ],
)
def test_objects_that_a_term_could_never_find_are_refused_before_a_model_is_loaded(
    tmp_path: Path, configs_dir: Path, options: str, overrides: tuple[str, ...], is_refused: bool
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        json.dumps({"id": "b", "prompt": "dogs", "include": [{"class": "dog", "count": 3}]})
    )
    (tmp_path / "find.py").write_text("def detect(pixels, classes):\n    return []\n")
    detector = f"detector: 'find.py:detect', folder: '{tmp_path}'"
    composition = f"{{{options}, {detector}, max_objects: 2}}"
    data = (f"data.path={path}", "data.eval_path=tiny:heldout")
    words = [*LEAST, *data, f"+reward.terms.composition={composition}", *overrides]
    config = compose_config(configs_dir, "tiny", words)
    if is_refused:
        with pytest.raises(
            DataError, match=r"prompt b \(.*prompts.jsonl, line 1\) asks for 3 dog, but at most"
        ):
            check_metadata(config, prompts_of(config).training, is_training=True)
    else:
        check_metadata(config, prompts_of(config).training, is_training=True)


def test_a_class_that_the_detector_does_not_know_is_refused_together_with_other_rows(
    tmp_path: Path, configs_dir: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    asked = [{"class": label, "count": 1} for label in ("circel", "circle", "sqare")]
    asked[1]["color"] = "reed"
    path.write_text("\n".join(json.dumps({"prompt": "a", "include": [one]}) for one in asked))
    data = (f"data.path={path}", f"data.eval_path={path}", "run_dir=r")
    with pytest.raises(DataError, match="3 checks failed") as caught:
        prepare(compose_config(configs_dir, "tiny_objects", data))
    for told in ("did you mean circle", "did you mean red", "did you mean square"):
        assert told in str(caught.value)


@pytest.fixture
def text_config(tmp_path: Path, configs_dir: Path) -> Callable[..., Config]:
    """Composes a config whose reward is OCR alone, with training prompts of its own."""

    def compose(*rows: dict[str, object], overrides: Sequence[str] = ()) -> Config:
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        data = (f"data.path={path}", "data.eval_path=tiny:heldout")
        words = [*LEAST, *data, *LEFT_OUT, "aesthetic=null", *overrides]
        return compose_config(configs_dir, "tiny", words)

    return compose


def test_a_row_that_no_term_can_score_is_refused_though_the_model_is_missing(
    text_config: Callable[..., Config],
) -> None:
    rows = ({"prompt": 'a sign "STOP"'}, {"prompt": "a cat"})
    with pytest.raises(ConfigError) as caught:
        prepare(text_config(*rows, overrides=["model.path=no/such/model"]))
    assert "no/such/model" in str(caught.value)
    assert "prompts.jsonl, line 2: prompt 00001 ('a cat') cannot be rewarded" in str(caught.value)


@pytest.mark.usefixtures("unloadable_model")
def test_a_text_that_the_scorer_cannot_read_is_refused_before_the_model_is_loaded(
    text_config: Callable[..., Config],
) -> None:
    config = text_config({"prompt": "a sign", "text": "OPEN \U0001f642"})
    for start in (lambda: list(check_config(config)), lambda: run_training(config)):
        with pytest.raises(RewardError, match="prompt 00000 asks for the text .* cannot read"):
            start()


def test_objects_that_prompts_ask_for_are_listed(tmp_path: Path, configs_dir: Path) -> None:
    dogs = {"prompt": "two dogs", "include": [{"class": "dog", "count": 2}]}
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"prompt": "a field"}, dogs])))
    data = (f"data.path={path}", "data.eval_path=tiny:heldout")
    config = compose_config(configs_dir, "tiny", [*LEAST, *data, OF_OBJECTS])
    listed = [line for line in list_asked(config, prompts_of(config)) if "objects" in line]
    assert listed[0] == "1 of 2 training prompts asks for objects: 00001 (2 dog)"
    assert listed[1].endswith(" ask for objects; a prompt asks for objects, by the field `include`")


def test_a_tag_that_is_nearly_one_of_geneval_s_is_named(tmp_path: Path, configs_dir: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    dogs = [{"class": "dog", "count": 2}]
    tags = ("colors", "colour", "animals")
    path.write_text(
        "\n".join(json.dumps({"prompt": "dogs", "tag": tag, "include": dogs}) for tag in tags)
    )
    data = (f"data.path={path}", "data.eval_path=tiny:heldout")
    config = compose_config(configs_dir, "tiny", [*LEAST, *data, OF_OBJECTS])
    assert hint_at_tags(prompts_of(config)) == [
        "the tag of 1 of 3 training prompts is nearly one of GenEval's: "
        "00001 (colour: did you mean colors?)"
    ]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ((), "learning rate falls to 0 at step 7; set optim.schedule=constant if"),
        (
            ("optim.schedule=constant", "sft.weight=1", "sft.final_weight=0"),
            "weight of targets reaches its last value at step 7; set sft.final_weight=null if",
        ),
        (
            ("sft.weight=1", "sft.final_weight=0"),
            "falls to 0 and the weight of targets reaches its last value at step 7; set "
            "optim.schedule=constant sft.final_weight=null if",
        ),
    ],
)
def test_a_run_that_cannot_be_extended_says_all_that_ends_it(
    overrides: tuple[str, ...], told: str
) -> None:
    assert told in _why_it_ends(tiny_config("train.steps=7", *overrides))


def test_help_loads_no_library_of_models() -> None:
    code = (
        "import sys\n"
        "from glm_grpo.cli import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit as end:\n"
        "    print(end.code, {'torch', 'diffusers', 'hydra', 'transformers'} & {*sys.modules})\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("usage: glm-grpo")
    assert ended.stdout.endswith("0 set()\n")


@pytest.mark.parametrize("program", ["glm_grpo.cli", "rewards.serve"])
def test_a_program_draws_without_the_backend_of_a_notebook(program: str) -> None:
    # torchmetrics imports matplotlib where it is installed.
    pytest.importorskip("matplotlib")
    # Such as module://matplotlib_inline.backend_inline, where matplotlib does not know it.
    code = (
        f"from {program} import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit:\n"
        "    import matplotlib\n"
    )
    environment = {**os.environ, "MPLBACKEND": "of_another_environment"}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
