"""Configs as they are mistyped, torn or made by others: each is refused in words.

Bound: refusing takes at most 5 s of processor time and 64 MiB, whatever is written.
"""

from __future__ import annotations

import copy
import string
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_grpo.config import Config, compose_config, from_yaml, to_yaml, validate_config
from glm_grpo.errors import ConfigError
from tests.generated import GENERATED

MEBIBYTE = 2**20
ROOT = Path(__file__).resolve().parents[2]
LONGEST_MESSAGE = 5_000

pytestmark = pytest.mark.timeout(60)

NOT_OF_THE_FORM = r"is not of the form key=value: "
WHOLE_NUMBER = "rule:   must be a whole number(.|\n)*remedy: "
FINITE = "rule:   must be a finite number(.|\n)*remedy: "
SECTION = "rule:   must be a section with keys of its own(.|\n)*remedy: "
UNKNOWN = "is not a key of (.|\n)*remedy: "

OVERRIDES = [
    # Numbers.
    ("train.steps=nan", WHOLE_NUMBER),
    ("train.steps=-5", "train.steps = -5\n.*must be at least 1(.|\n)*1 or more"),
    ("train.steps=1e3", WHOLE_NUMBER),
    ("train.steps=true", WHOLE_NUMBER),
    ("train.steps=null", WHOLE_NUMBER),
    ("train.steps=", "train.steps = ''\n.*must be a whole number(.|\n)*without quotation"),
    ("train.steps=a:b", WHOLE_NUMBER),
    ("train.seed=1e20", WHOLE_NUMBER),
    ("train.seed=-1", "must be at least 0(.|\n)*set train.seed to 0 or more"),
    ("train.steps=" + "9" * 5_000, "limit|digits"),
    ("optim.learning_rate=1e999", FINITE),
    ("optim.learning_rate=-inf", FINITE),
    ("optim.learning_rate=nan", FINITE),
    ("optim.learning_rate=-1", "must be greater than 0(.|\n)*more than 0"),
    ("rollout.temperature=nan", FINITE),
    ("rollout.height=-32", "must be at least 32(.|\n)*32 or more"),
    ("rollout.height=33", "must be a multiple of 32"),
    ("reward.terms.ocr.weight=nan", FINITE),
    ("reward.terms.ocr.weight=null", "must be a number"),
    # Lists, sections and values in each other's place.
    ("train.steps=[1,2]", WHOLE_NUMBER),
    ("train.steps={a: 1}", WHOLE_NUMBER),
    ("train=3", SECTION),
    ("train=null", SECTION),
    ("train=[1]", "Cannot merge DictConfig with ListConfig"),
    ("trackers={a: 1}", "trackers={a: 1}\nCannot merge DictConfig with ListConfig"),
    ("trackers=[[x]]", r"trackers\[0\] = \['x'\]\n.*must be one of tensorboard"),
    ("trackers=[1,[2],{}]", "3 problems"),
    ("trackers=tensorboard", "must be a list"),
    ("optim.betas=[]", r"write optim.betas="),
    ("optim.betas=[1,2,3]", "at most 2 items"),
    ("optim.betas=[0.9,[1]]", r"optim.betas\[1\] = \[1\]\n.*must be a number"),
    ("model.adapter=8", SECTION),
    ("+model.adapter=[1]", SECTION),
    ("+model.adapter={}", "model.adapter.rank=(.|\n)*model.adapter.alpha="),
    ("model.dtype=[a]", "must be one of float32, bfloat16"),
    ("data.path={a: 1}", "must be text"),
    ("run_dir=3", "run_dir = 3\n.*must be text"),
    ("run_dir=null", "must be text"),
    ("offload=[]", "must be one of none, modules"),
    ("reward=[]", r"reward \(not given\)"),
    ("reward.terms=[]", "Cannot merge DictConfig with ListConfig"),
    ("reward.terms=null", SECTION),
    ("reward.terms.lpips=3", "must be a section(.|\n)*write lpips: {weight: 1.0}"),
    ("reward.terms.ocr.engine=[]", r"engine = \[\]\n.*must be one of easyocr, rapidocr\n.*remedy"),
    ("reward.terms.ocr.engine={}", "must be one of easyocr, rapidocr"),
    ("reward.terms.ocr.engine=null", "must be one of easyocr, rapidocr"),
    ("+reward.terms.x={kind: [], weight: 1}", r"kind = \[\]\n.*must be one of lpips(.|\n)*custom"),
    ("+reward.terms.x={kind: {}, weight: 1}", "must be one of lpips"),
    ("+reward.terms.x={kind: null, weight: 1}", "must be one of lpips"),
    ("+reward.terms.x={kind: 3, weight: 1}", "must be one of lpips"),
    ("+reward.terms.1={kind: ssim, weight: 1}", "made of small letters(.|\n)*rename it"),
    ("+reward.terms." + "x" * 200 + "={kind: ssim, weight: 1}", "at most 40|too long"),
    ("reward.watch=[null]", r"reward.watch\[0\] = None\n.*must be text"),
    # Files of a group.
    ("model=null", "group override must be .* NoneType; write the name of a file"),
    ("model=3", "group override must be .* int; write the name of a file"),
    ("model=true", "group override must be .* bool; write the name of a file"),
    ("data=1.5", "group override must be .* float; write the name of a file"),
    ("model=tony", "Available options in 'model'"),
    ("model=../../etc", "Could not find 'model/../../etc'"),
    ("model=/etc/passwd", "Could not find 'model//etc/passwd'"),
    ("~model", r"model \(not given\)"),
    # Keys.
    ("schritte=1", UNKNOWN),
    ("train.schritte=1", "is not a key of train(.|\n)*remedy: "),
    ("train.steps.x=1", "is not a key of train.steps"),
    ("+train.steps.x=1", WHOLE_NUMBER),
    ("hydra.nope=1", UNKNOWN),
    ("schlüssel=1", NOT_OF_THE_FORM),
    ("+模型=1", NOT_OF_THE_FORM),
    ("\U0001f600=1", NOT_OF_THE_FORM),
    ("train.steps\u200b=1", NOT_OF_THE_FORM),
    ("\0=1", NOT_OF_THE_FORM),
    ("x" * 100_000 + "=1", "too long; shorten the key"),
    ("a." * 2_000 + "b=1", "too long; shorten the key"),
    ("~nothing", "'nothing' does not exist"),
    # Marks.
    *((mark, NOT_OF_THE_FORM) for mark in ('"', "'", "{", "[", "a b", "+", "++", "-m", "--help")),
    ("train.steps", f"'train.steps' {NOT_OF_THE_FORM}"),
    ("train..steps=1", NOT_OF_THE_FORM),
    (".train.steps=1", NOT_OF_THE_FORM),
    ("train.steps.=1", NOT_OF_THE_FORM),
    ("train.steps={", NOT_OF_THE_FORM),
    ("train.steps=}", NOT_OF_THE_FORM),
    ("train.steps=[1,", NOT_OF_THE_FORM),
    ("train.steps='", NOT_OF_THE_FORM),
    ("train.steps=\0", NOT_OF_THE_FORM),
    ("train.steps=int(x)", NOT_OF_THE_FORM),
    ("=", "cannot be composed"),
    ("=3", "cannot be composed: .*write the name of a file"),
    ("~", "cannot be composed"),
    ("train.steps=1,2", "Ambiguous value"),
    ("train.steps=choice(1,2)", "requires --multirun"),
    ("train.steps=" + "[" * 200 + "]" * 200, "nested too deeply; take out brackets"),
    ("train.steps=" + "{a: " * 200 + "1" + "}" * 200, "nested too deeply; take out brackets"),
    # Interpolations.
    ("train.steps=${", NOT_OF_THE_FORM),
    ("train.steps=${train.steps}", "Recursive interpolation detected"),
    ("run_dir=${run_dir}", "Recursive interpolation detected"),
    ("train.steps=${train}", "Interpolation to parent node"),
    ("train.steps=${nowhere}", "nowhere"),
    ("train.steps=${oc.env:NOT_SET_ANYWHERE}", "'NOT_SET_ANYWHERE' not found"),
    ("train.steps=${nope:1}", "Unsupported interpolation type nope"),
    ("train.steps=${oc.decode:'['}", "cannot be resolved"),
    ("model.path=???", r"model.path \(not given\)(.|\n)*write model.path="),
]


@pytest.mark.parametrize(
    ("override", "named"),
    [pytest.param(*case, id=ascii(case[0])[:40]) for case in OVERRIDES],
)
def test_a_bad_override_is_refused(configs_dir: Path, override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        compose_config(configs_dir, "tiny", [override])
    assert len(str(caught.value)) < LONGEST_MESSAGE + 2 * len(override)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "model", "tiny/", "/etc/passwd", "../configs/tiny", "é", "tiny\0", "x" * 300],
    ids=lambda name: ascii(name)[:20],
)
def test_a_name_that_is_no_config_is_refused(configs_dir: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be composed: .*"):
        compose_config(configs_dir, name)


@pytest.fixture(scope="module")
def stored() -> str:
    """A run folder's `config.yaml`."""
    return to_yaml(compose_config(ROOT / "configs", "tiny"))


def chain(link: str, length: int) -> str:
    return "a0: x\n" + "".join(f"a{n}: {link.format(n - 1)}\n" for n in range(1, length))


LISTED = "mapping of sections"
UNREADABLE = "The stored config cannot be read: "
STORED_TEXTS = [
    ("empty", "", "13 problems"),
    ("null", "null", "must be a YAML mapping of sections|13 problems"),
    ("number", "3", LISTED),
    ("text", "hello", LISTED),
    ("list", "- model", LISTED),
    ("torn", "model: {path: tiny", UNREADABLE),
    ("a tab", "model:\n\tpath: tiny", f"{UNREADABLE}(.|\n)*line 2, column 1"),
    ("a quote left open", 'run_dir: "x', UNREADABLE),
    ("a key twice", "train: {}\ntrain: {}", "found duplicate key train"),
    ("null character", "run_dir: \0", f"{UNREADABLE}unacceptable character #x0000"),
    ("escape character", "run_dir: \x1b[31m", f"{UNREADABLE}unacceptable character #x001b"),
    ("two documents", "a: 1\n---\nb: 2\n", "expected a single document"),
    ("number for a key", "1: 2", "(?m)^  1 = 1\n.*keys are text\n.*remove it"),
    ("fraction for a key", "1.5: 2", "1.5 = 1.5\n.*keys are text"),
    ("null for a key", "null: 2", f"{UNREADABLE}Incompatible key type"),
    ("list for a key", "? [a]\n: 2", "found unhashable key"),
    ("unicode keys", "schlüssel: 1\n模型: 2", "schlüssel = 1\n.*is not a key of the config"),
    ("an unknown tag", "run_dir: !foo x", "could not determine a constructor"),
    ("a tag of Python", "run_dir: !!python/object/apply:os.system [exit]", "could not determine"),
    ("a set", "trackers: !!set {aim}", f"{UNREADABLE}Value 'set' is not supported|set"),
    ("an unknown alias", "run_dir: *nope", "undefined alias|repeats a value"),
    ("an alias of itself", "trackers: &a [*a]", r"\*a repeats a value; write the value itself"),
    ("aliases of aliases", chain("&a{0} [*a{0}, *a{0}]", 3), "repeats a value|undefined alias"),
    ("lists in lists", "trackers: " + "[" * 2_000 + "]" * 2_000, "nested more than 50 deep"),
    ("sections in sections", "{a: " * 300 + "1" + "}" * 300, "nested more than 50 deep"),
    ("a number without end", "run_dir: " + "9" * 5_000, f"{UNREADABLE}.*digits"),
    ("a hexadecimal one", "train: {steps: -0x" + "f" * 5_000 + "}", "thousands of digits"),
    ("minutes", "train: {steps: 1:30}", "problems"),
    ("an interpolation", "run_dir: ${oc.env:HOME}", "12 problems"),
    ("interpolations in a circle", "a: ${b}\nb: ${a}", "problems"),
]


@pytest.mark.parametrize(
    ("text", "named"), [pytest.param(*case, id=what) for what, *case in STORED_TEXTS]
)
def test_a_bad_stored_config_is_refused(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        from_yaml(text)
    assert len(str(caught.value)) < LONGEST_MESSAGE


@pytest.mark.parametrize(
    "text",
    [
        # 9 ** 9 words; 2 ** 60 words.
        "a0: &a0 [x]\n"
        + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)),
        chain("${{a{0}}}${{a{0}}}", 60),
        "[" * 1_000_000,
        "a: " + "x" * 5_000_000,
    ],
    ids=["aliases", "interpolations", "brackets", "text"],
)
def test_a_stored_config_that_grows_is_refused_in_time_and_memory(
    peak_memory: Callable[[Callable[[], object]], int], text: str
) -> None:
    def refuse() -> None:
        with pytest.raises(ConfigError) as caught:
            from_yaml(text)
        assert len(str(caught.value)) < 20_000

    start = time.process_time()
    assert peak_memory(refuse) < 64 * MEBIBYTE
    assert time.process_time() - start < 30


def test_a_stored_config_does_not_read_the_environment(
    stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A run folder may be someone else's, and what is read from it goes into pages.
    monkeypatch.setenv("JUDGE_KEY", "secret")
    values = yaml.safe_load(stored)
    values["run_dir"] = "${oc.env:JUDGE_KEY}"
    assert "secret" not in to_yaml(from_yaml(yaml.safe_dump(values)))


def test_marks_and_line_ends_of_other_systems_do_not_matter(stored: str) -> None:
    assert from_yaml("\ufeff" + stored.replace("\n", "\r\n")) == from_yaml(stored)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(max_size=10)
    | st.sampled_from(["", "tiny", "auto", "0", "nan", "???", "${train.steps}", "\0"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3)
    ),
    max_leaves=5,
)


def leaves(values: dict[str, Any], place: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, value in values.items():
        found.append((*place, name))
        if isinstance(value, dict):
            found += leaves(value, (*place, name))
    return found


def validate_or_refuse(values: object) -> None:
    """Anything but ConfigError, and a config that does not survive its own file, fails."""
    try:
        config = validate_config(values)
    except ConfigError as error:
        message = str(error)
    else:
        assert isinstance(config, Config)
        return
    assert message.count("rule:") == message.count("remedy:") > 0


@settings(GENERATED, max_examples=200)
@given(data=st.data(), value=VALUES)
def test_any_value_in_any_place_is_accepted_or_refused(
    stored: str, data: st.DataObject, value: object
) -> None:
    values = copy.deepcopy(yaml.safe_load(stored))
    *sections, name = data.draw(st.sampled_from(leaves(values)))
    section = values
    for part in sections:
        section = section[part]
    section[name] = value
    validate_or_refuse(values)


@GENERATED
@given(
    key=st.text(max_size=12) | st.integers() | st.none() | st.tuples(st.integers()),
    section=st.sampled_from(["", "train", "model", "reward"]),
)
def test_any_key_in_any_section_is_refused(stored: str, key: object, section: str) -> None:
    values = yaml.safe_load(stored)
    (values[section] if section else values)[key] = 1
    with pytest.raises(ConfigError, match="rule:(.|\n)*remedy:"):
        validate_config(values)


@GENERATED
@given(value=VALUES)
def test_any_value_for_a_config_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="rule:(.|\n)*remedy:"):
        validate_config(value)


@settings(GENERATED, max_examples=40)
@given(
    key=st.sampled_from(
        ["train.steps", "model", "+reward.terms.x", "trackers", "run_dir", "~train", ""]
    ),
    value=st.text(st.sampled_from("{}[]()'\"\\$:=,.+-~@ 1ax\0é") | st.sampled_from(string.digits)),
)
def test_any_marks_on_the_command_line_are_accepted_or_refused(
    configs_dir: Path, key: str, value: str
) -> None:
    try:
        config = compose_config(configs_dir, "tiny", [f"{key}={value}"])
    except ConfigError:
        return
    assert config.train.steps >= 1


@settings(GENERATED, max_examples=100)
@given(
    place=st.integers(0, 3_000), added=st.text(min_size=1, max_size=4), removed=st.integers(0, 6)
)
def test_a_changed_stored_config_is_accepted_or_refused(
    stored: str, place: int, added: str, removed: int
) -> None:
    place %= len(stored)
    changed = stored[:place] + added + stored[place + removed :]
    try:
        config = from_yaml(changed)
    except ConfigError:
        return
    assert from_yaml(to_yaml(config)) == config


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model=3", "write the name of a file"),
        ("train.steps=" + "[" * 200 + "]" * 200, "nested too deeply"),
        ("x" * 1_000 + "=1", "too long; shorten the key"),
    ],
    ids=["group", "nesting", "key"],
)
def test_train_refuses_what_hydra_fails_over_without_a_traceback(
    tmp_path: Path, override: str, named: str
) -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), override],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert result.returncode == 2
    assert named in result.stderr
    assert "Traceback" not in result.stderr
