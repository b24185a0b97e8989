from __future__ import annotations

import pytest

from rewards.types import Prompt, RewardError, describe_error

WORDLESS = ValueError()
WORDLESS.__cause__ = OSError("a side of 0")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RewardError("scores.example answered 500"), "scores.example answered 500"),
        (ValueError("broken"), "ValueError: broken"),
        (NotImplementedError(), "NotImplementedError"),
        (RewardError(""), "RewardError"),
        (WORDLESS, "ValueError from OSError: a side of 0"),
    ],
    ids=repr,
)
def test_describe_error_never_says_nothing(error: Exception, said: str) -> None:
    assert describe_error(error) == said


def test_metadata_without_names_are_refused() -> None:
    prompt = Prompt("dog", "a dog")
    # Past the types that are checked in tests only.
    prompt.__dict__.update(metadata=[{"class": "dog", "count": 1}])
    with pytest.raises(ValueError, match=r"metadata is \[\{'class'.*; it must be a mapping"):
        prompt.__post_init__()
