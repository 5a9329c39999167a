"""Known names: bits are given out, kept and taken back by rule."""

from commlib.coordinator.names import KnownNames
from commlib.coordinator.request import Request


def request(name, verb="allreduce"):
    return Request(verb, name)


def test_bits_are_the_lowest_that_are_free():
    names = KnownNames(8)
    for name in "abc":
        names.add(request(name))
    assert [names.bit(request(name)) for name in "abc"] == [0, 1, 2]
    assert names.remove("a") == 0 and names.remove("b") == 1
    names.add(request("d"))
    assert names.bit(request("d")) == 0
    assert names.all_bits == 0b101 and names.highest == 3 and len(names) == 2


def test_the_same_name_for_something_else_is_not_known():
    names = KnownNames(8)
    names.add(request("a"))
    assert "a" in names
    assert names.bit(request("a", "allgather")) is None
    assert names.bit(request("b")) is None


def test_what_was_told_longest_ago_goes_first():
    names = KnownNames(2)
    names.add(request("a"))
    assert not names.is_full
    names.add(request("b"))
    assert names.is_full and names.oldest == "a"
    names.remove("a")
    names.add(request("a"))
    assert names.oldest == "b"
