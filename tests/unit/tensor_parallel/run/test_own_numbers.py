"""Own numbers: one module's numbers in a configuration that others share."""

from __future__ import annotations

import copy
from types import SimpleNamespace

from commlib.tensor_parallel import PerRank
from commlib.tensor_parallel.plan import resolve
from commlib.tensor_parallel.run.number_proxy import set_number
from commlib.tensor_parallel.run.rank_numbers import ModuleNumber


def test_numbers_change_for_one_module_alone() -> None:
    config = SimpleNamespace(heads=8, width=4, kind="eager")
    own = set_number(config, "heads", 2)
    assert (own.heads, own.width, config.heads) == (2, 4, 8)
    assert isinstance(own, SimpleNamespace)
    config.kind = "sdpa"  # as transformers sets it later
    own.width = 5
    assert (own.kind, config.width) == ("sdpa", 5)
    assert (copy.deepcopy(own).heads, copy.copy(own).heads) == (2, 2)
    assert set_number(own, "heads", 8) is config
    both = set_number(own, "width", 1)
    assert (both.heads, both.width, own.width) == (2, 1, 5)


def test_a_number_of_a_configuration_can_change() -> None:
    config = SimpleNamespace(heads=8)
    modules = [SimpleNamespace(config=config), SimpleNamespace(config=config)]
    number = ModuleNumber(modules[0], "config", "heads")
    assert (number.own_name, number.value) == ("config.heads", 8)
    number.put(4)
    assert [module.config.heads for module in modules] == [4, 8]
    number.put(8)
    assert modules[0].config is config


def test_patterns_apply_to_a_configuration_only_if_they_name_it() -> None:
    """`*.heads` would have changed a module's own number, and its configuration's, which other code reads."""
    numbers = ["attn.heads", "attn.config.heads"]
    assert resolve({"*.heads": PerRank()}, [], numbers=numbers).keys() == {"attn.heads"}
    assert resolve({"*.config.heads": PerRank()}, [], numbers=numbers).keys() == {"attn.config.heads"}
