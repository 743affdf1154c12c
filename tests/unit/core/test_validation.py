"""Options that check themselves, and files that are read as a type."""

from __future__ import annotations

import pickle
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from tests.refusals import refused

from apexrl.core.errors import ConfigError, RunDirError
from apexrl.core.validation import Count, Fraction, Number, checked, create, field_help, field_rules, options


@options("algo")
class Base:
    """Options."""

    steps: Count = 1
    """How many."""
    kind: Literal["fast", "slow"] = "fast"
    """How."""


@options("algo")
class Derived(Base):
    """More of them."""

    widths: tuple[Count, ...] | None = None
    """Of the layers."""
    names: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Which."""
    share: Fraction = 0.5
    """How much."""
    either: bool | Literal["auto"] = "auto"
    """Whether."""
    most: Number = 1.0
    """At most."""

    def __post_init__(self) -> None:
        if self.share > self.most:
            raise ConfigError(f"algo.share must not be above algo.most ({self.most}), got {self.share}.")


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Of a user, who knows nothing of ``options``."""

    rate: float = 0.1


@pytest.mark.parametrize(
    ("values", "field", "rest"),
    [
        ({"steps": 0}, "algo.steps", ["at least 1", "got 0"]),
        ({"steps": True}, "algo.steps", ["integer", "got True"]),
        ({"steps": 2.5}, "algo.steps", ["integer", "got 2.5"]),
        ({"steps": "many"}, "algo.steps", ["integer", "'many'"]),
        ({"kind": "slwo"}, "algo.kind", ["fast", "slow", "'slwo'", "Did you mean 'slow'?"]),
        ({"widths": [4, 0]}, "algo.widths", ["list of integers", "null", "[4, 0]"]),
        ({"names": ()}, "algo.names", ["strings", "not empty", "[]"]),
        ({"share": 1.5}, "algo.share", ["from 0 to 1", "got 1.5"]),
        ({"share": "nan"}, "algo.share", ["'nan'"]),
        ({"most": float("inf")}, "algo.most", ["number", "inf"]),
        ({"either": "x"}, "algo.either", ["true", "false", "auto", "'x'"]),
        ({"share": 0.9, "most": 0.1}, "algo.share", ["algo.most", "0.9"]),
        ({"stepz": 1}, "algo.stepz", ["Did you mean 'steps'?"]),
    ],
)
def test_a_wrong_value_is_one_line_with_field_rule_and_value(
    values: dict[str, Any], field: str, rest: list[str]
) -> None:
    for make in (lambda: Derived(**values), lambda: create("algo", Derived, values)):
        with refused(ConfigError, field, *rest) as caught:
            make()
        assert "\n" not in str(caught.value)


def test_every_wrong_field_has_a_line() -> None:
    with refused(ConfigError, "algo.steps", "algo.share") as caught:
        Derived(steps=0, share=2)
    assert len(str(caught.value).splitlines()) == 2


def test_options_are_dataclasses_that_hold_what_their_types_say() -> None:
    made = Derived(steps="1e3", widths=[8, 8])  # type: ignore[arg-type]
    assert asdict(made) == {
        "steps": 1000, "kind": "fast", "widths": (8, 8), "names": None, "share": 0.5, "either": "auto", "most": 1.0
    }  # fmt: skip
    assert isinstance(made.steps, int)
    assert pickle.loads(pickle.dumps(made)) == replace(made)
    assert [entry.name for entry in fields(made)] == list(field_help(Derived)) == list(field_rules(Derived))
    assert field_help(Derived)["steps"] == "How many."
    with pytest.raises(AttributeError):
        made.steps = 3  # type: ignore[misc]


def test_a_plain_dataclass_of_a_user_is_checked_too() -> None:
    assert create("algo", Plain, {"rate": "1e-3"}) == Plain(rate=1e-3)
    with refused(ConfigError, "algo.rate", "number", "'fast'"):
        create("algo", Plain, {"rate": "fast"})


def test_a_file_is_read_as_its_type_or_refused_with_the_place() -> None:
    assert checked(list[Base], [{"steps": 3}], "x.json") == [Base(steps=3)]
    assert checked(list[Base], b'[{"steps": 3}]', "x.json") == [Base(steps=3)]
    with refused(RunDirError, "x.json", "1.steps", "got 0"):
        checked(list[Base], [{}, {"steps": 0}], "x.json is damaged", error=RunDirError)
