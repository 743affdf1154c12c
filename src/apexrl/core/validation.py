"""Options that check themselves: type, range, choices and help of a field come from its one declaration.

``options`` makes a pydantic dataclass of a class whose fields are written as ``learning_rate: Positive = 3e-4``, each
with the sentence of its help below. A problem is a ``ConfigError`` of one line that names field, rule and value.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields, is_dataclass
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PydanticUserError,
    Strict,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass, is_pydantic_dataclass
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from apexrl.core.errors import ApexRLError, ConfigError, did_you_mean
from apexrl.core.renamed import renamed

T = TypeVar("T")
_CONFIG = ConfigDict(use_attribute_docstrings=True, extra="forbid")


def as_number(value: Any) -> Any:
    """Read text such as 1e6, which YAML does not take for a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _number(value: Any) -> Any:
    """Read a number; true and false, which Python takes for 1 and 0, are none."""
    if isinstance(value, bool):
        raise PydanticCustomError("boolean", "true and false are no numbers")
    return as_number(value)


Integer = Annotated[int, BeforeValidator(_number)]
Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Count = Annotated[Integer, Field(ge=1)]
NonNegativeInteger = Annotated[Integer, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
NonNegative = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
Share = Annotated[Number, Field(gt=0, le=1)]
ProperFraction = Annotated[Number, Field(gt=0, lt=1)]
Natural = Annotated[int, Strict(), Field(ge=0)]
"""In a file that apexrl wrote: an integer of at least 0, and nothing that could be read as one."""


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field, Field))
def options(section: str) -> Callable[[type[T]], type[T]]:
    """Make a frozen dataclass that checks its values and takes them by name; ``section`` is what messages call it."""

    def decorate(cls: type[T]) -> type[T]:
        made: Any = dataclass(frozen=True, kw_only=True, config=_CONFIG)(cls)
        validate = made.__init__

        @functools.wraps(validate)
        def __init__(self: Any, **values: Any) -> None:  # noqa: N807
            try:
                validate(self, **values)
            except ValidationError as error:
                raise ConfigError("\n".join(_problems(section, made, values, error))) from None

        made.__init__ = __init__
        checked: type[T] = made
        return checked

    return decorate


def create(section: str, cls: Any, values: Mapping[str, Any]) -> Any:
    """Return options of plain values; those of a class that is no pydantic dataclass are checked here."""
    if is_pydantic_dataclass(cls):
        return cls(**values)
    try:
        return TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_problems(section, cls, values, error))) from None


def field_help(cls: Any) -> dict[str, str]:
    """Return the sentence below each field of a class of options, inherited ones first."""
    found: dict[str, str] = {}
    for parent in reversed(cls.__mro__):
        own: Mapping[str, FieldInfo] = parent.__dict__.get("__pydantic_fields__", {})
        texts = {name: entry.description for name, entry in own.items()}
        if not own and is_dataclass(parent):
            with contextlib.suppress(PydanticUserError):  # a type that no schema describes
                properties = TypeAdapter(parent).json_schema()["properties"]
                texts = {name: entry.get("description") for name, entry in properties.items()}
        found |= {name: " ".join(text.split()) for name, text in texts.items() if text}
    return found


def field_rules(cls: Any) -> dict[str, str]:
    """Return what each field of a class of options must be, such as ``a number above 0 or null``."""
    kinds = get_type_hints(cls, include_extras=True)
    return {entry.name: rule(kinds[entry.name]) for entry in fields(cls)}


def rule(kind: Any, bounds: tuple[Any, ...] = ()) -> str:
    """Say in words what a value of a type must be."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return rule(inner[0], (*_constraints(inner[1:]), *bounds))
    if origin is Literal:
        return inner[0] if len(inner) == 1 else f"one of {', '.join(map(str, inner))}"
    if origin in (Union, types.UnionType):
        return " or ".join(rule(each, bounds) for each in inner)
    if origin is tuple:
        of = rule(inner[0]).removeprefix("an ").removeprefix("a ").replace("integer", "integers", 1)
        empty = ", not empty" if any(hasattr(each, "min_length") for each in bounds) else ""
        return f"a list of {of.replace('string', 'strings', 1)}{empty}"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string", type(None): "null"}
    return names.get(kind, "a mapping of names to values") + _range(bounds)


def _constraints(metadata: Iterable[Any]) -> Iterable[Any]:
    return (part for each in metadata for part in (each.metadata if isinstance(each, FieldInfo) else (each,)))


def _range(bounds: Iterable[Any]) -> str:
    ends = {name: getattr(each, name) for each in bounds for name in ("ge", "gt", "le", "lt") if hasattr(each, name)}
    if len(ends) == 2:
        (low, least), (high, most) = ends.items()
        if (low, high) == ("ge", "le"):
            return f" from {least} to {most}"
        return f" in {'[' if low == 'ge' else '('}{least}, {most}{']' if high == 'le' else ')'}"
    words = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}
    return "".join(f" {words[name]} {end}" for name, end in ends.items())


def _problems(section: str, cls: Any, values: Mapping[str, Any], error: ValidationError) -> list[str]:
    """Return a line for each field that is wrong."""
    lines: dict[str, str] = {}
    kinds = get_type_hints(cls, include_extras=True)
    prefix = f"{section}." if section else ""
    for entry in error.errors(include_url=False):
        name = str(entry["loc"][0]) if entry["loc"] else ""
        if isinstance(cause := entry.get("ctx", {}).get("error"), ConfigError):
            lines[name] = str(cause)
        elif name not in kinds:
            is_renamed = renamed(prefix + name, [prefix + known for known in kinds])
            lines[name] = is_renamed or f"Unknown field '{prefix}{name}'.{did_you_mean(name, kinds)}"
        else:
            given, hint = entry["input"], ""
            if isinstance(given, str):
                hint = did_you_mean(given, [choice for choice in choices(kinds[name]) if isinstance(choice, str)])
            if given == values[name] and isinstance(given, str | int) and rule(kinds[name]).startswith("a list"):
                hint = f' Write "[{", ".join(str(given).replace(",", " ").split())}]".'
            value = list(values[name]) if isinstance(values[name], tuple) else values[name]
            lines[name] = f"{prefix}{name} must be {rule(kinds[name])}, got {value!r}.{hint}"
    return list(lines.values())


def choices(kind: Any) -> list[Any]:
    """Return the choices of a type, also of those inside it."""
    inner = get_args(kind)
    return list(inner) if get_origin(kind) is Literal else [choice for each in inner for choice in choices(each)]


def up_to(version: int) -> AfterValidator:
    """Refuse the version of a file that a later apexrl wrote."""

    def check(value: int) -> int:
        if value > version:
            text = f"it is of version {value}, this apexrl reads up to version {version}. Update apexrl"
            raise PydanticCustomError("version", text)
        return value

    return AfterValidator(check)


def checked(kind: type[T], content: Any, before: str, after: str = ".", error: type[ApexRLError] = ConfigError) -> T:
    """Return plain values, or bytes of JSON, as a type.

    Args:
        kind: a dataclass, a NamedTuple, or any other type that pydantic understands.
        content: what is read.
        before: the beginning of the error, such as "x.json is damaged"; what does not fit follows in brackets.
        after: the end of the error.
        error: what is raised.
    """
    adapter = TypeAdapter(kind)
    try:
        return adapter.validate_json(content) if isinstance(content, bytes) else adapter.validate_python(content)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        place, value = ".".join(map(str, first["loc"])), repr(first["input"])
        text = f"{first['msg'].removeprefix('Value error, ')}, got {value if len(value) < 100 else value[:100] + '…'}"
        raise error(f"{before} ({f'{place}: ' if place else ''}{text}){after}") from None
