"""Errors that users can act on: value, rule and remedy, printed without a traceback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto


class Aftermath(Enum):
    """What an error leaves of a run, and how the run ends.

    Trackers and gallery are finished after all of them but `UNKNOWN`.
    """

    UNKNOWN = auto()
    """Save nothing."""

    INTACT = auto()
    """Save the last finished step: its policy is as good as ever."""

    LOST = auto()
    """Name a checkpoint from before the last finished step, whose policy cannot be used."""

    SAVED = auto()
    """Name the newest checkpoint."""

    EXPLAINED = auto()
    """Add nothing: the error says what is saved."""


class GlmGrpoError(Exception):
    """Base of every error raised on purpose. Exit code 1 unless a subclass sets another one.

    Attributes:
        aftermath: What it leaves of a run.
        parts: Errors of independent checks that it combines; usually none.
    """

    exit_code = 1
    aftermath = Aftermath.UNKNOWN
    parts: Sequence[GlmGrpoError] = ()


def is_expected(error: Exception) -> bool:
    """Whether a user can act on it; any other exception is a bug."""
    # Takes seconds, so only after an error.
    from rewards.types import RewardError  # noqa: PLC0415

    return isinstance(error, (GlmGrpoError, RewardError))


def aftermath_of(error: Exception) -> Aftermath:
    """What any error leaves of a run; a term that fails does not affect the policy."""
    if isinstance(error, GlmGrpoError):
        return error.aftermath
    return Aftermath.INTACT if is_expected(error) else Aftermath.UNKNOWN


class ConfigError(GlmGrpoError, ValueError):
    """A config key is unknown, mistyped, out of range or conflicts with another. Exit code 2."""

    exit_code = 2


class DataError(GlmGrpoError, ValueError):
    """A prompts file or an image cannot be used. Exit code 2."""

    exit_code = 2


class Errors:
    """Errors of checks that do not depend on each other, to be raised together."""

    def __init__(self) -> None:
        self._collected: dict[str, GlmGrpoError] = {}

    def __len__(self) -> int:
        return len(self._collected)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect an error of the block; a repeated message counts once."""
        try:
            yield
        except GlmGrpoError as error:
            self._collected |= {str(part): part for part in error.parts or (error,)}

    def raise_all(self) -> None:
        """Raise a single error as it is, several as one."""
        if len(self._collected) == 1:
            raise next(iter(self._collected.values()))
        if self._collected:
            is_of_data = all(isinstance(error, DataError) for error in self._collected.values())
            combine = DataError if is_of_data else ConfigError
            combined = combine(
                "\n- ".join([f"{len(self._collected)} checks failed:", *self._collected])
            )
            combined.parts = [*self._collected.values()]
            raise combined


class ModelError(GlmGrpoError, RuntimeError):
    """The model cannot be loaded, or does not behave as the method requires."""


class DecoderError(ModelError):
    """The decoder's output is not an image; the policy is not at fault."""

    aftermath = Aftermath.INTACT


class SelfCheckError(ModelError):
    """Sampling and replay disagree, an on-policy ratio is not 1, or a grid is not full."""


class StorageError(GlmGrpoError, OSError):
    """Writing to the run folder failed; what was stored before is intact."""


class CheckpointError(GlmGrpoError, RuntimeError):
    """A checkpoint is missing, truncated, or belongs to another config. Exit code 2."""

    exit_code = 2


class HackingError(GlmGrpoError, RuntimeError):
    """A canary left its band, and the run is configured to stop; everything is saved."""

    aftermath = Aftermath.EXPLAINED


class MemoryLimitError(GlmGrpoError, MemoryError):
    """Memory ran out, or would; the message names the phase and the keys to change."""

    aftermath = Aftermath.INTACT


class NonFiniteError(GlmGrpoError, ArithmeticError):
    """The policy is lost: log-probabilities or weights are not finite."""

    aftermath = Aftermath.LOST


class NonFiniteUpdateError(NonFiniteError):
    """No update of several steps was finite; the weights are those from before them."""

    aftermath = Aftermath.SAVED


class CollectorError(GlmGrpoError, RuntimeError):
    """A collector of an asynchronous run failed, or collectors died repeatedly."""

    aftermath = Aftermath.INTACT


class PeerError(GlmGrpoError, RuntimeError):
    """Another process of the run failed or is gone, so this one cannot continue."""

    aftermath = Aftermath.SAVED
