"""Find, import and name functions of users: reward terms, losses, and the source of either."""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from rewards.process_defaults import defaults_kept
from rewards.types import RewardError, describe_error

Function = Callable[..., Any]

_GIVEN: dict[str, Function] = {}
"""Functions given from Python, by the names that configs have for them."""

_NOT_IN_FOLDERS = frozenset({"__main__", "glm_grpo", "rewards"})
"""Modules that a folder of the user's cannot have."""


@dataclass(frozen=True)
class NamedFunction:
    """A function of the user's that a section of a config names.

    Attributes:
        option: Option with its name; the option `folder` is beside it.
        name: `file.py:function` or `module:function`.
        folder: Where it is searched for first.
    """

    option: str
    name: str
    folder: str | None

    def sources(self) -> dict[str, bytes]:
        """See `find_sources`."""
        return find_sources(self.name, self.folder)


def name_function(function: Function, term: str) -> str:
    """Name a function as `module:function`, by which `load_function` finds it in this process.

    Args:
        function: Any callable. Other processes find it only if its module has it under its name.
        term: Takes the place of a name that is not the module's, such as that of a lambda.
    """
    module, own = function.__module__, getattr(function, "__name__", term)
    is_importable = getattr(sys.modules.get(module), own, None) is function
    name = f"{module}:{own if is_importable else term}"
    _GIVEN[name] = function
    return name


def find_folder(name: str, places: Iterable[str | Path | None]) -> Path | None:
    """The first of some folders that has the file or module of a function; None if none has it."""
    module = _module_of(name)
    folders = (Path(place).absolute() for place in places if place)
    return next((each for each in folders if _file_in(each, module) is not None), None)


def _module_of(name: str) -> str:
    """The part before the function: a module, or the path of a file, which ends with `.py`."""
    return name.rpartition(":")[0]


def _file_in(folder: Path, module: str) -> Path | None:
    if module.endswith(".py"):
        file = folder / module
        return file if file.is_file() else None
    if module.partition(".")[0] in _NOT_IN_FOLDERS:
        return None
    return _file_below(folder, module.split("."))


def _file_below(folder: Path, names: Sequence[str]) -> Path | None:
    path = folder.joinpath(*names)
    files = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    return next(filter(Path.is_file, files), None)


def load_function(name: str, folder: str | None = None) -> Function:
    """Import `module:function` or `file.py:function`, unless `name_function` knows it.

    Defaults of the process that the module changes, such as torch's default dtype, are restored.

    A file is searched for in the folder and in the working folder, a module on Python's path, too.
    It can import its neighbours only while it is imported; imports inside its functions find
    installed and already imported modules.
    """
    if name in _GIVEN:
        return _GIVEN[name]
    module_name, _, function_name = name.rpartition(":")
    module = _import(module_name, name, _folder_or_here(name, folder))
    try:
        function: Function = getattr(module, function_name)
    except AttributeError as error:
        functions = sorted(key for key, value in vars(module).items() if callable(value))
        nearest = difflib.get_close_matches(function_name, functions, n=1)
        remedy = f"did you mean {nearest[0]}?" if nearest else f"it has {', '.join(functions)}"
        if module_name == "__main__":
            remedy = "put it in a module of its own, which every process can import"
        # The module of a notebook has no file.
        place = getattr(module, "__file__", module_name)
        raise RewardError(
            f"custom function {name!r}: {place} has no {function_name}; {remedy}"
        ) from error
    return function


def find_sources(name: str, folder: str | None = None) -> dict[str, bytes]:
    """Sources by module that a custom function is made of.

    The file or module that the name states comes first; then that which defines the function, and
    what these import from their own package or folder, inside functions too. Of a function of a
    script or notebook, only its own source.

    Returns:
        Empty if there is no source, as for a function of a compiled module.
    """
    module_name, function = _module_of(name), _GIVEN.get(name)
    while isinstance(function, functools.partial):
        function = function.func
        module_name = function.__module__
    if module_name == "__main__":
        # A script also holds the settings of the run; a notebook has no file.
        with contextlib.suppress(OSError, TypeError):
            source = inspect.getsource(function or load_function(name))
            return {module_name: source.encode()}
        return {}
    place = _folder_or_here(name, folder)
    if function is None:
        # What cannot be imported is reported elsewhere.
        with contextlib.suppress(RewardError):
            function = load_function(name, folder)
    names = [getattr(function, "__module__", module_name)]
    if not module_name.endswith(".py"):
        return _read_modules([module_name, *names], place)
    file = place / module_name
    if not file.is_file():
        return {}
    content = file.read_bytes()
    names += _imports_of(content, "")
    names = [each for each in names if each != str(file) and _file_in(file.parent, each)]
    return {module_name: content} | _read_modules(names, file.parent)


def _read_modules(names: list[str], place: Path) -> dict[str, bytes]:
    """Read modules, and those of their packages, or of the folder, that they import."""
    found: dict[str, bytes] = {}
    while names:
        name = names.pop(0)
        file = _file_in(place, name) or _file_on_path(name)
        if name in found or file is None:
            continue
        found[name] = file.read_bytes()
        top = name.partition(".")[0]
        if top not in _NOT_IN_FOLDERS:
            parent = name.rpartition(".")[0]
            imported = _imports_of(found[name], name if file.name == "__init__.py" else parent)
            names += [
                each
                for each in filter(None, (parent, *imported))
                if each.partition(".")[0] == top or _file_in(place, each)
            ]
    return found


def _file_on_path(module: str) -> Path | None:
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(module.partition(".")[0])
    return None if spec is None else _file_of(module, spec)


def _file_of(module: str, top: ModuleSpec) -> Path | None:
    # A package has folders, a module a file; one that is built in has neither.
    first = next(iter(top.submodule_search_locations or []), top.has_location and top.origin)
    return _file_below(Path(first).parent, module.split(".")) if first else None


def _imports_of(source: bytes, package: str) -> Iterator[str]:
    """Names in the import statements of a module; some may be those of functions."""
    # Such a module cannot be imported.
    with contextlib.suppress(SyntaxError, ValueError, ImportError):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                relative = f"{'.' * node.level}{node.module or ''}"
                base = importlib.util.resolve_name(relative, package)
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _folder_or_here(name: str, folder: str | None) -> Path:
    return find_folder(name, [folder, Path.cwd()]) or Path.cwd()


def _import(module_name: str, name: str, folder: Path) -> ModuleType:
    is_file = module_name.endswith(".py")
    if not is_file:
        _refuse_taken(module_name, name, folder)
    try:
        if is_file:
            return _import_file(folder / module_name)
        with _importable(module_name, folder):
            return importlib.import_module(module_name)
    # A user's module may raise anything during import.
    except Exception as error:
        raise RewardError(
            f"custom function {name!r}: {module_name} cannot be imported "
            f"({describe_error(error)}). It must be beside the config, in the working folder "
            f"({Path.cwd()}), or in the `folder` that the config has beside `function`; a module "
            "may also be installed. All that it imports must be there, too"
        ) from error


def _import_file(file: Path) -> ModuleType:
    """Import a file as a module of its own, whose name is its path, once in a process."""
    name = str(file)
    if name not in sys.modules:
        module = sys.modules[name] = ModuleType(name)
        module.__file__ = name
        try:
            # Last on the path, because the file may have the name of what it imports.
            with _importable(name, file.parent, place=len(sys.path)):
                SourceFileLoader(name, name).exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _refuse_taken(module_name: str, name: str, folder: Path) -> None:
    """Refuse a module of the folder whose name an imported or installed one has."""
    there, top = _file_in(folder, module_name), module_name.partition(".")[0]
    # Python's own entry for a script, and the working folder, hold files of the user's, too.
    own = {folder, Path.cwd(), Path(sys.path[0]).absolute()}
    installed = [entry for entry in sys.path if Path(entry).absolute() not in own]
    spec = sys.modules[top].__spec__ if top in sys.modules else PathFinder.find_spec(top, installed)
    if there is None or spec is None:
        return
    other = _file_of(module_name, spec)
    if other is None or other.read_bytes() != there.read_bytes():
        raise RewardError(
            f"custom function {name!r}: {there} cannot be imported, because the name {top} is "
            f"taken by {other or spec.origin or 'another folder'}; name the file instead: "
            f"{there.relative_to(folder)}:{name.rpartition(':')[2]}"
        )


@contextlib.contextmanager
def _importable(module_name: str, folder: Path, place: int = 0) -> Iterator[None]:
    # The glm-grpo script has its own folder on the path where `python` has the working directory.
    sys.path.insert(place, str(folder))
    # Finders cache a folder's contents; the module may be newer.
    importlib.invalidate_caches()
    try:
        with defaults_kept(f"importing {module_name}"):
            yield
    finally:
        with contextlib.suppress(ValueError):  # the module removed it itself
            sys.path.remove(str(folder))
