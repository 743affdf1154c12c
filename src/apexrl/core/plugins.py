"""What users bring along: registries of names, and the rule by which modules of users are imported.

A name that was typed on the command line, registered in this process, or installed as an entry point is trusted. A
module that a file names is imported only when the user allows it (``--allow-imports``), so that a configuration, a run
directory or a checkpoint from elsewhere runs no code of its choice.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, Literal, TypeVar

import cloudpickle

from apexrl.core.errors import ApexRLError, ConfigError, UntrustedError, did_you_mean

T = TypeVar("T")
FIELDS = ("task.id", "algo.name", "policy.kind")
"""Fields of a configuration that may name something in a module, as ``module:name``."""
KNOWN_MODULES = ("gymnasium_robotics",)
"""Modules that this package itself imports by name."""


@dataclass
class Trust:
    """What this process may import, and what it has imported."""

    everything: bool = False
    """Whether modules that files name are imported."""
    names: set[str] = field(default_factory=set)
    """Modules and ``module:name`` that the user typed."""
    modules: dict[str, None] = field(default_factory=dict)
    """Every module that was imported for the user, in order."""
    imports: dict[str, None] = field(default_factory=dict)
    """Those of ``--import`` and ``import``, which a configuration keeps."""


_trust = Trust()


def trust(names: Iterable[str]) -> None:
    """Trust modules and ``module:name`` that were typed."""
    _trust.names.update(names)


@contextmanager
def imports_allowed(allow: bool = True) -> Iterator[None]:
    """Import modules that files name while the block runs, if ``allow``."""
    before = _trust.everything
    _trust.everything = before or allow
    try:
        yield
    finally:
        _trust.everything = before


def allow_imports() -> None:
    """Import modules that files name from here on."""
    _trust.everything = True


def flag() -> str:
    """Return what a command needs to read again what this process trains; it starts with a space, or is empty."""
    return " --allow-imports" if _trust.modules else ""


def imported() -> tuple[str, ...]:
    """Return the modules that were imported because of ``--import`` or ``import``."""
    return tuple(_trust.imports)


def require_trust(name: str, field: str) -> None:
    """Raise unless a module, or ``module:name``, that may come from a file may be imported."""
    if not (_trust.everything or name in _trust.names or name.partition(":")[0] in KNOWN_MODULES):
        raise UntrustedError(
            f"{field} '{name}' names a module, which is not imported for a name in a file. If you trust the file, add "
            "--allow-imports (in Python allow_imports=True)."
        )


def import_all(names: Iterable[str]) -> None:
    """Import the modules of ``--import`` or ``import``, which may register things."""
    for name in names:
        require_trust(name, "import")
        import_module(name)
        _trust.imports[name] = None


def import_module(name: str) -> ModuleType:
    """Import a module of the user, which may also lie in the current directory.

    That directory comes last, and only now: it cannot hide an installed module from anybody.

    Raises:
        ConfigError: when the import fails, in one line.
    """
    here = str(Path.cwd())
    sys.path.append(here)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also what leaves the process
        raise ConfigError(f"cannot import {name}: {_cause(error, name)}") from error
    finally:
        places = [place for place, path in enumerate(sys.path) if path == here]
        for place in places[-1:]:
            del sys.path[place]
    _trust.modules[name] = None
    return module


def _cause(error: BaseException, name: str) -> str:
    """Say in one line why an import failed, and where."""
    if isinstance(error, ModuleNotFoundError) and name.split(".")[0] == error.name:
        return f"{error}. Install it, or start in the directory that has {error.name}.py."
    return _with_place(error, "" if isinstance(error, SyntaxError) else traceback.extract_tb(error.__traceback__)[-1])


def _with_place(error: BaseException, frame: traceback.FrameSummary | Literal[""]) -> str:
    """Return an exception in one line, with the place in a file."""
    text = " ".join(f"{type(error).__name__}: {error}".removesuffix(": ").split())
    return f"{text} ({Path(frame.filename).name}, line {frame.lineno})" if frame else text


@contextmanager
def creating(what: str, cls: type) -> Iterator[None]:
    """Say in one line why something of a user cannot be created, with the place in the user's file.

    Raises:
        ConfigError: begins with ``what``.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ApexRLError) or cls.__module__.startswith("apexrl."):
            raise
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        raise ConfigError(f"{what}: {_with_place(error, frames[-1] if frames else '')}.") from error


def module_hint(name: str) -> str:
    """Return how to name something in a module, for a name without a colon that looks like a module; or nothing."""
    module, dot, last = name.rpartition(".")
    if not dot and any(Path(place).is_file() for place in (f"{name}.py", f"{name}/__init__.py")):
        module, last = name, "Class"
    is_module = module and all(part.isidentifier() for part in f"{module}.{last}".split("."))
    return f" For something in a module write module:Class, such as {module}:{last}." if is_module else ""


def load_reference(reference: str) -> Any:
    """Import ``module:name`` and return what it names.

    Raises:
        ConfigError: when the import fails, or the module has no such name.
    """
    module, _, name = reference.partition(":")
    found = import_module(module)
    if not hasattr(found, name):
        raise ConfigError(f"{module} has no '{name}'.{did_you_mean(name, vars(found))}")
    return getattr(found, name)


def accepted(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some options that a function or a constructor takes by name."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(options)
    return {name: value for name, value in options.items() if name in parameters}


class Registry(dict[str, T], Generic[T]):
    """Names in a configuration, and what they stand for: built in, registered, installed, or ``module:name``.

    Args:
        field: of the configuration.
        group: of the entry points.
        check: returns what is wrong with something of a user, or an empty string.
        entries: what is built in.
    """

    def __init__(
        self, field: str, group: str, check: Callable[[Any], str], entries: Mapping[str, T] | None = None
    ) -> None:
        super().__init__(entries or {})
        self.field, self.group, self.check, self.built_in = field, group, check, frozenset(self)

    def register(self, name: str, value: T) -> None:
        """Give something a name that configurations may use; what a user had given it before is replaced."""
        if not name or ":" in name:
            raise ConfigError(f"A name for {self.field} must not be empty or hold a colon, got {name!r}.")
        if name in self.built_in:
            raise ConfigError(f"{self.field} '{name}' is built in; choose another name.")
        self[name] = self._checked(name, value)

    def names(self) -> list[str]:
        """Return every name, also of what is installed and was not loaded yet."""
        return list(dict.fromkeys([*self, *_entry_points(self.group)]))

    def find(self, name: str) -> T | None:
        """Return what a name stands for; None when there is no such name.

        Raises:
            ConfigError: when a name in a file is not trusted, or what it names cannot be imported or used.
        """
        if name in self:
            return self[name]
        point = _entry_points(self.group).get(name)
        if point is None and ":" not in name:
            return None
        if point is None:
            if name.startswith(":") or name.endswith(":"):
                raise ConfigError(f"{self.field} must be a name, or module:Class as my_module:MyClass, got '{name}'.")
            require_trust(name, self.field)
        try:
            value = load_reference(name if point is None else point.value)
        except ConfigError as error:
            raise ConfigError(f"{self.field} {name}: {error}") from error
        self[name] = self._checked(name, value)
        return self[name]

    def _checked(self, name: str, value: Any) -> T:
        if problem := self.check(value):
            raise ConfigError(f"{self.field} {name} {problem}, got {value!r}.")
        return value  # type: ignore[no-any-return]


def _entry_points(group: str) -> dict[str, metadata.EntryPoint]:
    return {point.name: point for point in metadata.entry_points(group=group)}


class Portable:
    """A value for another process, which first gets the trust of this one and imports the modules of the user.

    There it becomes the value itself, so ``with_imports`` may stand wherever the value is pickled.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the value."""
        return self.value(*arguments, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (_trust, cloudpickle.dumps(self.value))


def with_imports(value: T) -> T:
    """Return a value for other processes; one that needs no module of the user as it is."""
    return Portable(value) if _trust.modules else value  # type: ignore[return-value]


def _revive(state: Trust, pickled: bytes) -> Any:
    inherit(state)
    return cloudpickle.loads(pickled)


def trusted() -> Trust:
    """Return what another process needs to inherit."""
    return _trust


def inherit(state: Trust) -> None:
    """Trust what another process trusts, and import the modules of the user that it has imported."""
    _trust.everything |= state.everything
    _trust.names |= state.names
    for name in state.modules:
        import_module(name)
    _trust.imports.update(state.imports)
