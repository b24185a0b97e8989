from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from rewards import score_images
from rewards.base import score_checked
from rewards.config import RewardConfig, with_functions
from rewards.score import Scorer, Term
from rewards.score_map import Grid, map_on_grid
from rewards.terms.custom import CustomReward
from rewards.types import Prompt, RewardError, RewardTable
from rewards.user_functions import load_function

DOG = Prompt("dog", "a dog")
PIXELS = torch.tensor([0, 51, 255], dtype=torch.uint8)[:, None, None, None].expand(3, 3, 2, 2)

Write = Callable[[str], str]


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a module into the current folder, which is not on the path; returns its name."""
    names = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])

    def write(source: str) -> str:
        names.append(f"scoring_of_a_user_{len(names)}")
        (tmp_path / f"{names[-1]}.py").write_text(source)
        return names[-1]

    yield write
    for name in names:
        sys.modules.pop(name, None)


def test_a_function_given_from_python_is_found_by_the_name_of_its_term():
    dark = lambda prompts, pixels: 1 - pixels.float().mean(dim=(1, 2, 3)) / 255  # noqa: E731
    black = Image.new("RGB", (8, 8))
    scores = score_images(["a night"], [black], rewards={"dark": dark})
    assert scores.to_dict("records") == [{"dark": 1.0, "total": 1.0}]
    # A term of the config keeps its weight; its function is one of this module.
    config = {"terms": {"dark": {"kind": "custom", "weight": 0.5}}}
    reward = RewardConfig.model_validate(with_functions(config, {"dark": score}))
    assert reward.weights() == {"dark": 0.5}
    assert reward.terms["dark"].function == f"{__name__}:score"
    assert reward.terms["dark"].folder == str(Path(__file__).parents[2])
    assert load_function(f"{__name__}:dark") is dark


def score(function: str) -> RewardTable:
    """The way of a run: by the scorer, which judges what comes back."""
    reward = CustomReward(function, needs=("prompt",))
    return Scorer([Term("mine", reward, 1.0)]).score([DOG], PIXELS[None])


def test_custom_calls_the_function_with_prompts_and_images(write_module: Write) -> None:
    name = write_module(
        "import torch\n"
        "def score(prompts, pixels):\n"
        "    assert type(prompts) is list and pixels.dtype == torch.uint8\n"
        "    lengths = torch.tensor([len(prompt.prompt) for prompt in prompts])\n"
        "    return pixels.float().mean(dim=(1, 2, 3)) / 255 + lengths\n"
    )
    table = score(f"{name}:score")
    torch.testing.assert_close(table.raw, torch.tensor([[[5.0], [5.2], [6.0]]]))


def test_custom_function_may_refuse_an_image(write_module: Write) -> None:
    name = write_module("def score(prompts, pixels):\n    return [0.25, None, 1]\n")
    table = score(f"{name}:score")
    assert table.raw.nan_to_num(-1.0).flatten().tolist() == [0.25, -1.0, 1.0]
    assert table.is_refused().flatten().tolist() == [False, True, False]


@pytest.mark.parametrize(
    "parts",
    ["torch.full((3, 1, 2), 0.5)", "((ScoreBox(1.0, 0.0, 0.0, 2.0, 2.0, 'A'),), (), ())"],
)
def test_custom_function_may_return_parts_and_notes(write_module: Write, parts: str) -> None:
    name = write_module(
        "import torch\n"
        "from rewards import ScoreBox, Scores\n"
        "def score(prompts, pixels):\n"
        "    values = torch.ones(len(prompts))\n"
        f"    return Scores(values, notes=('a', 'b', 'c'), score_map={parts})\n"
    )
    reward = CustomReward(f"{name}:score", needs=())
    scores = score_checked(reward, [DOG] * 3, PIXELS, with_map=True)
    placed = map_on_grid(scores.score_map, Grid(1, 2), height=2, width=2)
    assert placed[0].tolist() == [[0.5, 0.5]]
    assert scores.notes == ("a", "b", "c")
    # A table of scores has the notes, too.
    assert score(f"{name}:score").notes == {"mine": (("a", "b", "c"),)}


def test_custom_function_that_works_in_place_changes_neither_images_nor_prompts(
    write_module: Write,
) -> None:
    name = write_module(
        "def score(prompts, pixels):\n"
        "    prompts[0].target.zero_()\n"
        "    prompts[0].metadata.pop('include').clear()\n"
        "    pixels.zero_()\n"
        "    return pixels.float().mean(dim=(1, 2, 3))\n"
    )
    pixels = torch.full((1, 3, 2, 2), 7, dtype=torch.uint8)
    asked = {"include": [{"class": "dog", "count": 1}]}
    prompt = Prompt("dog", "a dog", target=pixels[0].clone(), metadata=asked)
    scores = CustomReward(f"{name}:score", needs=()).score([prompt], pixels)
    assert scores.tolist() == [0.0]
    assert (pixels == 7).all()
    assert (prompt.target == 7).all()
    assert prompt.metadata == {"include": [{"class": "dog", "count": 1}]}


def test_custom_module_finds_its_neighbours_and_leaves_the_path_as_it_was(
    write_module: Write,
) -> None:
    neighbour = write_module("def score(prompts, pixels):\n    return 'from the neighbour'\n")
    name = write_module(f"import sys\nfrom {neighbour} import score\nsys.path.append('/its/own')\n")
    before = list(sys.path)
    reward = CustomReward(f"{name}:score", needs=())
    assert reward.score([DOG], PIXELS[:1]) == "from the neighbour"
    assert sys.path == [*before, "/its/own"]


@pytest.mark.usefixtures("own_defaults")
def test_importing_a_module_changes_no_default_of_the_process(
    write_module: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir()
    name = write_module(
        "import os, torch\n"
        "torch.set_default_dtype(torch.bfloat16)\n"
        "torch.set_default_device('meta')\n"
        "torch.set_grad_enabled(False)\n"
        "torch.set_num_threads(3)\n"
        "os.chdir('elsewhere')\n"
        "def score(prompts, images): return images.float().mean(dim=(1, 2, 3)) / 3\n"
    )
    table = score(f"{name}:score")
    assert table.raw.flatten().tolist() == (torch.tensor([0.0, 51.0, 255.0]) / 3).tolist()
    assert torch.get_default_device() == torch.device("cpu")
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == 1
    assert Path.cwd() == tmp_path
    (record,) = caplog.records
    assert record.getMessage().startswith(f"importing {name} changed torch.get_default_dtype() ")


def test_custom_module_is_found_in_its_folder_from_any_other(
    write_module: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    neighbour = write_module("def score(prompts, pixels):\n    return 'found'\n")
    name = write_module(f"from {neighbour} import score\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    function = f"{name}:score"
    with pytest.raises(RewardError, match=f"working folder .{tmp_path}/elsewhere."):
        load_function(function)
    reward = CustomReward(function, needs=(), folder=str(tmp_path))
    assert reward.score([DOG], PIXELS[:1]) == "found"


def test_custom_module_of_the_name_of_another_one_is_refused(
    write_module: Write, tmp_path: Path
) -> None:
    name = write_module("def score(prompts, pixels): return 1\n")
    load_function(f"{name}:score")
    (tmp_path / "second").mkdir()
    (tmp_path / f"second/{name}.py").write_text("def score(prompts, pixels): return 2\n")
    with pytest.raises(
        RewardError, match=f"taken by {tmp_path}/{name}.py; .*file.*{name}.py:score"
    ):
        load_function(f"{name}:score", str(tmp_path / "second"))
    # By file, both can be loaded in one process.
    for place, found in (("", 1), ("second/", 2)):
        assert load_function(f"{place}{name}.py:score")([], None) == found


@pytest.mark.parametrize(
    ("source", "function", "error"),
    [
        ("", "no_such_module_here:score", "ModuleNotFoundError: .*beside the config"),
        ("", "no/such/file.py:score", "FileNotFoundError: .*beside the config"),
        ("import no_such_library", "{}:score", "named 'no_such_library'"),
        ("1 / 0", "{}:score", "ZeroDivisionError: division by zero"),
        ("def scores(p, x): ...", "{}:score", r"user_0.py has no score; did you mean scores\?"),
        ("def b(): ...\ndef a(): ...", "{}:score", "it has a, b"),
        ("def score(images): ...", "{}:score", r"def score\(prompts, images"),
    ],
)
def test_custom_function_that_cannot_be_found_is_refused_with_the_reason(
    write_module: Write, source: str, function: str, error: str
) -> None:
    function = function.format(write_module(source))
    before = list(sys.path)
    with pytest.raises(RewardError, match=f"custom function '{function}'.*{error}"):
        CustomReward(function, needs=())
    assert sys.path == before
