"""The response cache: bits are assigned, retained and released by rule."""

from commlib.coordinator.op_request import OpRequest
from commlib.coordinator.response_cache import ResponseCache


def request(name, verb="allreduce"):
    return OpRequest(verb, name)


def test_bits_are_the_lowest_free():
    cache = ResponseCache(8)
    for name in "abc":
        cache.add(request(name))
    assert [cache.bit(request(name)) for name in "abc"] == [0, 1, 2]
    assert cache.remove("a") == 0 and cache.remove("b") == 1
    cache.add(request("d"))
    assert cache.bit(request("d")) == 0
    assert cache.all_bits == 0b101 and cache.highest == 3 and len(cache) == 2


def test_a_name_with_another_request_is_not_cached():
    cache = ResponseCache(8)
    cache.add(request("a"))
    assert "a" in cache
    assert cache.bit(request("a", "allgather")) is None
    assert cache.bit(request("b")) is None


def test_the_least_recent_name_is_evicted_first():
    cache = ResponseCache(2)
    cache.add(request("a"))
    assert not cache.is_full
    cache.add(request("b"))
    assert cache.is_full and cache.oldest == "a"
    cache.remove("a")
    cache.add(request("a"))
    assert cache.oldest == "b"
