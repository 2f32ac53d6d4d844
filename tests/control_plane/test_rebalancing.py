"""Which prefixes are copied, from where to where."""

from __future__ import annotations

from dataclasses import replace

from sagellm.control_plane.rebalancing import HotPrefix, RebalancingOptions, cold_instances, replications
from sagellm.core.protocols.router import ExecutionInstance

OPTIONS = RebalancingOptions(bytes_per_token=100_000.0, bytes_per_s=1e9)


def instance(name: str, utilization: float) -> ExecutionInstance:
    return ExecutionInstance(name, utilization=utilization, prefill_token_s=1e-4)


HOT, WARM, COLD, COLDEST = (
    instance("hot", 0.9),
    instance("warm", 0.4),
    instance("cold", 0.3),
    instance("coldest", 0.1),
)
FLEET = [HOT, WARM, COLD, COLDEST]
SYSTEM_PROMPT = HotPrefix(b"system", 2000, 4.0, frozenset({"hot"}))


def test_cold_instances() -> None:
    assert cold_instances(FLEET) == [COLDEST, COLD]
    assert cold_instances([]) == []
    assert cold_instances([instance("a", 0.5), instance("b", 0.5)]) == []


def test_a_hot_prefix_goes_to_the_coldest_instance() -> None:
    [copy] = replications([SYSTEM_PROMPT], FLEET, OPTIONS)
    assert (copy.key, copy.source, copy.target) == (b"system", "hot", "coldest")
    assert copy.gain == 4.0 / 2 * 2000 * 1e-4
    assert copy.reason == "2 requests/s would compute 2000 tokens there; the copy takes 0.2 s"


def test_each_target_gets_one_copy_at_a_time() -> None:
    other = replace(SYSTEM_PROMPT, key=b"other", uses_per_s=3.0)
    copies = replications([other, SYSTEM_PROMPT], FLEET, OPTIONS)
    assert [(each.key, each.target) for each in copies] == [(b"system", "coldest"), (b"other", "cold")]


def test_what_was_copied_lately_is_not_copied_again_nor_from_there() -> None:
    coming = replace(SYSTEM_PROMPT, coming=frozenset({"coldest"}))
    assert replications([coming], FLEET, OPTIONS) == []  # its requests will go there
    warm = [HOT, WARM, COLD, instance("coldest", 0.8)]
    [copy] = replications([coming], warm, OPTIONS)
    assert (copy.source, copy.target) == ("hot", "cold")
    assert replications([replace(coming, holders=frozenset({"gone"}))], warm, OPTIONS) == []


def test_a_busy_target_gets_nothing_and_another_one_does() -> None:
    [copy] = replications([SYSTEM_PROMPT], FLEET, OPTIONS, {"coldest"})
    assert copy.target == "cold"


def test_what_does_not_pay_is_not_copied() -> None:
    rare = replace(SYSTEM_PROMPT, uses_per_s=0.01)
    held_by_warm = replace(SYSTEM_PROMPT, holders=frozenset({"hot", "warm"}))
    lost = replace(SYSTEM_PROMPT, holders=frozenset({"gone"}))
    there = replace(SYSTEM_PROMPT, holders=frozenset({"hot", "cold", "coldest"}))
    assert replications([rare, held_by_warm, lost, there], FLEET, OPTIONS) == []
    assert replications([SYSTEM_PROMPT], [], OPTIONS) == []
