"""``benchmarks/switches.py`` on a module of a few lines."""

from __future__ import annotations

import ast

import switches

MODULE = ast.parse(
    """
class VecEnv: ...
class Cart(VecEnv): ...
class FastCart(Generic[T], base.Cart): ...
class TaskConfig: ...
class Suite(TaskConfig): ...
class Table: ...

def act(env, table, config):
    if isinstance(table, Table | dict):
        return
    if isinstance(env, FastCart | Table) and not isinstance(env, (int, envs.Cart)):
        assert isinstance(config, TaskConfig)
    if type(env) is Cart or env.__class__ in (Table, FastCart) or type(env) is type(table):
        assert issubclass(type(config), Suite)
    match config:
        case Suite(name="a"):
            pass
        case Table():
            pass
"""
)


def test_classes_are_those_of_a_family_and_all_that_inherit_from_them() -> None:
    assert switches.family_classes([MODULE]) == {"VecEnv", "Cart", "FastCart", "TaskConfig", "Suite"}


def test_every_way_to_ask_for_a_class_counts_once() -> None:
    found = switches.switches(MODULE, switches.family_classes([MODULE]))
    assert [line for line, _ in found] == [12, 12, 13, 14, 14, 15, 17]
