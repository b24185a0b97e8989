from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from glm_grpo.run.folder import RunFolder
from glm_grpo.studio.rescore.rescore import MovedImage, Rescoring, SettingChange, TermChange
from glm_grpo.studio.rescore.tables import print_rescoring

PROMPT = "[red]a sign[/red] that says CAT"


def moved(sample: int, before: float, after: float) -> MovedImage:
    image = f"images/step-000003/p0-{sample}.png"
    return MovedImage(3, "p0", PROMPT, sample, image, before, after)


RESCORING = Rescoring(
    changes=(SettingChange("reward.terms.ocr.weight", 0.3, 0.5),),
    steps=1,
    groups=8,
    images=32,
    changed_winners=2,
    rank_correlation=0.3333,
    ranked_groups=7,
    zero_std_before=1,
    zero_std_after=0,
    terms=(TermChange("ocr", 0.3, 0.5, 0.625, 0.75), TermChange("lpips", 0.4, 0.4, 0.375, 0.25)),
    gaining=(moved(1, -0.5, 1.25), moved(2, 0.0, 0.5)),
    losing=(moved(3, 1.5, -0.25),),
)


FOLDER = RunFolder(Path("outputs/run"))


def printed(rescoring: Rescoring, width: int = 140) -> str:
    console = Console(width=width, file=io.StringIO())
    print_rescoring(console, FOLDER, rescoring)
    return console.file.getvalue()


def test_print_rescoring_says_what_was_found() -> None:
    rare = "lpips (40% of the weight) applies to none of the 12 prompts that the run sampled"
    text = printed(replace(RESCORING, rare_terms=(rare,)))
    for words in (
        "images 32, groups 8, steps 1",
        "0.3 to 0.5",
        "2 (25.0%)",
        "7 groups",
        "0.333",
        "1 to 0",
        "0.625",
        "gain most",
        "lose most",
        "-0.50",
        "+1.25",
        # A user's text is no markup.
        PROMPT,
        rare,
    ):
        # Without the breaks of captions.
        assert words in " ".join(text.split()), words


def test_print_rescoring_leaves_out_what_is_not_there() -> None:
    unranked = replace(RESCORING, gaining=(), losing=(), rank_correlation=None, ranked_groups=0)
    text = printed(unranked)
    assert "gain most" not in text
    assert "lose most" not in text
    assert "no advantage changes" in text
    assert "no advantage changes" not in printed(RESCORING)
    (line,) = [line for line in text.splitlines() if "tau-b" in line]
    assert line.split("│")[2].strip() == "-"


def test_paths_are_whole_on_a_line_of_a_narrow_terminal() -> None:
    long = replace(
        moved(4, 0.0, 1.0), prompt=9 * "word " + "OPEN", image=f"images/{30 * 'a '}p-[red].png"
    )
    lines = printed(replace(RESCORING, gaining=(long,)), width=80).splitlines()
    assert any(line.endswith(f" {FOLDER.path / long.image}") for line in lines)
    # Figures stay beside their prompt, whose middle is left out.
    (row,) = [line for line in lines if "+1.00" in line]
    assert row.startswith("│ 1  word word word wor…ord ")
    assert row.endswith("word OPEN │    3 │      4 │  +0.00 │ +1.00 │")
    assert len(row) <= 80


@pytest.mark.parametrize(("share", "shown"), [(-0.0004, "0.000"), (-0.0006, "-0.001")])
def test_a_share_is_below_0_where_it_is_shown_so(share: float, shown: str) -> None:
    terms = (TermChange("ocr", 0.3, 0.5, share, 1.0),)
    text = printed(replace(RESCORING, terms=terms))
    (line,) = [line for line in text.splitlines() if line.startswith("│ ocr ")]
    assert line.split("│")[4].strip() == shown
    assert ("against the total" in text) is (shown != "0.000")
