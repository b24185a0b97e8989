"""Share of small faults in the core that the fast tests notice (mutation testing).

    pip install -e '.[mutants]'
    pytest --cov=glm_grpo --cov=rewards --cov-context=test --cov-report=
    python -m tools.mutants --count 80 --seed 0 --resume outputs/mutants.jsonl

The second line takes minutes and writes `.coverage`: which test runs which line. The third draws
places of the code at random, makes one of cosmic-ray's changes at each (`+` to `-`, `<` to `<=`, a
number one off, a condition negated, a loop left out), and runs the tests that run the changed
statement, in a copy of the working tree: those that run the fewest lines first, until one fails.

Not drawn: annotations, decorators, texts and what is raised, aliases of types; bit operators in
place of arithmetic (or the reverse) and identity in place of order, which every call would notice
or none.
A result is one line of the file of `--resume`. Mutants that are in it are not tried again, so take
out the line of one that a new test shall kill. Survivors are judged by hand: some change nothing
that can be seen.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[1]
_GLM, _TRAINING = "glm_grpo/models/glm_image", "glm_grpo/training"
AREAS = {
    "maths": ("glm_grpo/grpo/*.py", f"{_TRAINING}/learning_rate.py"),
    "sampling": (
        *(f"{_GLM}/{name}.py" for name in ("sampling", "policy", "token_grid", "network")),
        f"{_GLM}/fast/*.py",
        f"{_TRAINING}/collect.py",
    ),
    "replay": (f"{_TRAINING}/replay_check.py",),
    "decoder": (f"{_GLM}/decoder.py",),
    "reweighing": (
        *(f"rewards/{name}.py" for name in ("reweigh", "score", "steering", "audit/shares")),
    ),
    "evaluation and targets": (
        *(f"{_TRAINING}/{name}.py" for name in ("evaluate", "targets", "moving_average")),
    ),
    "checkpoint": (
        *(f"{_TRAINING}/checkpoint/{name}.py" for name in ("files", "optimizer_state", "saver")),
        f"{_TRAINING}/checkpoint/run_state.py",
    ),
    "resume": (f"{_TRAINING}/checkpoint/resume.py",),
}
_ALIKE = ({"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow"}, {"BitAnd", "BitOr", "BitXor"})
"""Operators that stand in for one another."""
_LIBRARIES = ("diffusers", "hypothesis", "open_clip", "pandas", "peft", "scipy", "torchmetrics")
"""Imported once for all mutants, because they take longer than the tests."""
_LIMIT_S = 900
"""Of all tests of a mutant; one that takes longer (a loop without end) counts as noticed."""

Position = tuple[int, int]


@dataclass(frozen=True)
class Mutant:
    """One change of one place: occurrence `occurrence` of cosmic-ray's `operator` in the file."""

    area: str
    path: str
    line: int
    operator: str
    occurrence: int


def find_mutants(area: str, path: Path) -> dict[tuple[Position, Position], list[Mutant]]:
    """The changes of a file, by the place (start and end) that they change."""
    source = path.read_text()
    lines = source.splitlines()
    nodes = list(ast_nodes(get_ast(source)))
    inert = list(_find_inert(ast.parse(source)))
    found = defaultdict(list)
    for name in filter(_is_likely_mistake, operator_names()):
        places = [p for node in nodes for p in get_operator(name)().mutation_positions(node)]
        for occurrence, (start, end) in enumerate(places):
            # cosmic-ray takes the star before keyword-only arguments for a multiplication.
            is_inert = lines[start[0] - 1][start[1] :].startswith("*,") or any(
                first <= start and end <= last for first, last in inert
            )
            if not is_inert:
                file = str(path.relative_to(ROOT))
                found[start, end].append(Mutant(area, file, start[0], name, occurrence))
    return found


def _is_likely_mistake(operator: str) -> bool:
    if get_operator(operator).arguments() or operator.endswith("RemoveDecorator"):
        return False
    kind, before, after = f"{operator}__".split("_")[:3]
    if kind.endswith("BinaryOperator"):
        return any({before, after} <= operators for operators in _ALIKE)
    return not (after.startswith("Is") and not before.startswith("Is"))


def _find_inert(tree: ast.Module) -> Iterator[tuple[Position, Position]]:
    for node in ast.walk(tree):
        parts: list[ast.expr | None] = list(getattr(node, "decorator_list", ()))
        parts += [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.Raise):
            parts.append(node.exc)
        if isinstance(node, ast.JoinedStr) and " " in ast.unparse(node):
            parts.append(node)
        for part in filter(None, parts):
            yield _span(part)
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and "|" in ast.unparse(statement.value):
            yield _span(statement)


def _span(node: ast.expr | ast.stmt) -> tuple[Position, Position]:
    return (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)


def draw(count: int, seed: int) -> list[Mutant]:
    """Places are drawn with equal chances, then one change of each."""
    places = [
        mutants
        for area, patterns in AREAS.items()
        for pattern in patterns
        for path in sorted(ROOT.glob(pattern))
        for _, mutants in sorted(find_mutants(area, path).items())
    ]
    rng = random.Random(seed)
    return [rng.choice(mutants) for mutants in rng.sample(places, count)]


class Covering:
    """Which tests run a statement, from coverage's contexts."""

    def __init__(self, data: CoverageData) -> None:
        self._lines = {file: data.contexts_by_lineno(file) for file in data.measured_files()}
        self._sizes = Counter(
            test for lines in self._lines.values() for tests in lines.values() for test in tests
        )

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Names of tests, those that run the fewest lines first.

        Statements of a module or class run while it is imported, under no test: for these it is
        every test that runs a line of the file.
        """
        lines = self._lines.get(str(ROOT / mutant.path), {})
        span = _statement_lines(ast.parse((ROOT / mutant.path).read_text()), mutant.line)
        found = {test for line in span for test in lines.get(line, ())}
        if "" in found:
            found = {test for tests in lines.values() for test in tests}
        ranked = sorted(found - {""}, key=lambda test: (self._sizes[test], test))
        return list(dict.fromkeys(test.rpartition("|")[0] for test in ranked))


def _statement_lines(tree: ast.Module, line: int) -> range:
    """Lines of the innermost statement around a line; of one with a body, those before it."""
    found = range(line, line + 1)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            end = body[0].lineno if body else (node.end_lineno or 0) + 1
            if line < end:
                found = range(node.lineno, end)
    return found


def copy_tree(folder: Path) -> None:
    """Copies what git tracks or would track."""
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def try_mutant(mutant: Mutant, tests: Sequence[str], folder: Path) -> dict[str, object]:
    """Runs the tests on the changed file in the copy `folder`, and undoes the change."""
    source = (ROOT / mutant.path).read_text()
    changed = mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence)
    (folder / mutant.path).write_text(changed)
    killer = find_failure(tests, folder)
    if killer is None:
        # The other tests of these files may see by a shared fixture what the first one ran.
        files = sorted({test.partition("::")[0] for test in tests})
        killer = find_failure([*files, *(f"--deselect={test}" for test in tests)], folder)
    shutil.copy2(ROOT / mutant.path, folder / mutant.path)
    lines = difflib.unified_diff(source.splitlines(), changed.splitlines(), lineterm="", n=0)
    return {**asdict(mutant), "killer": killer, "tests": len(tests), "diff": list(lines)[3:]}


def find_failure(tests: Sequence[str], folder: Path) -> str | None:
    """Runs tests in the copy until one fails: that one, or None."""
    if not tests:
        return None
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_LIBRARIES))
    log = folder / "tests.log"
    process = context.Process(target=_run_tests, args=(tests, folder, log))
    process.start()
    process.join(_LIMIT_S)
    if process.exitcode is None:
        os.killpg(process.pid or 0, signal.SIGKILL)
        return f"no end within {_LIMIT_S} s"
    if process.exitcode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", log.read_text(), re.MULTILINE)
    return failed[1] if failed else log.read_text()[-300:]


def _run_tests(tests: Sequence[str], folder: Path, log: Path) -> None:
    os.setsid()
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    # Programs that a test starts import the copy too.
    os.environ["PYTHONPATH"] = str(folder)
    options = ("-x", "-q", "--no-header", "-p", "no:cacheprovider")
    os._exit(pytest.main([*options, *tests]))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, default=ROOT / "outputs" / "mutants.jsonl")
    parser.add_argument("--coverage", type=Path, default=ROOT / ".coverage")
    options = parser.parse_args()
    options.resume.parent.mkdir(parents=True, exist_ok=True)
    options.resume.touch()
    rows = [json.loads(line) for line in options.resume.read_text().splitlines()]
    data = CoverageData(str(options.coverage))
    data.read()
    covering = Covering(data)
    tried = {(row["path"], row["operator"], row["occurrence"]) for row in rows}
    with tempfile.TemporaryDirectory() as name:
        copy_tree(Path(name))
        for mutant in draw(options.count, options.seed):
            if (mutant.path, mutant.operator, mutant.occurrence) in tried:
                continue
            rows.append(try_mutant(mutant, covering.tests_of(mutant), Path(name)))
            with options.resume.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
        killers = {row["killer"] for row in rows if str(row["killer"]).startswith("tests/")}
        if (failed := find_failure(sorted(killers), Path(name))) is not None:
            raise SystemExit(f"{failed} fails on the code as it is: it kills nothing")
    for area in AREAS:
        killed = [row["killer"] is not None for row in rows if row["area"] == area]
        sys.stdout.write(f"{area}: {sum(killed)} of {len(killed)}\n")
    for row in rows:
        if row["killer"] is None:
            change = "\n".join(row["diff"])
            sys.stdout.write(f"{row['path']}:{row['line']}\n{change}\n")


if __name__ == "__main__":
    main()
