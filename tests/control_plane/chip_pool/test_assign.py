"""Which chips and cores instances get, and what a refusal says."""

from __future__ import annotations

import pytest

from sagellm.control_plane.chip_pool import InstanceNeeds, RequestWork
from sagellm.core.errors import BookkeepingError, CapacityError, ConfigError
from sagellm.core.protocols.router import InstanceType
from sagellm.core.protocols.topology import DeviceKind
from tests.control_plane.chip_pool.machines import GIB, host

PREFILL, DECODE = InstanceType.PREFILLING, InstanceType.DECODING


def test_prefill_gets_flops_and_decode_bandwidth() -> None:
    needs = [InstanceNeeds("decode-0", DECODE), InstanceNeeds("prefill-0", PREFILL)]
    found = host("wide fast").assign(needs)
    assert found.lease("prefill-0").chips == ("cuda:1",)
    assert found.lease("decode-0").chips == ("cuda:0",)
    assert found.reasons["prefill-0"] == "cuda:1: a request as prefilling takes on fast 32 ms, wide 213 ms"
    assert found.reasons["decode-0"] == "cuda:0: a request as decoding takes on wide 38.9 ms, fast 77.8 ms"


def test_where_one_stage_gains_more_it_gets_the_better_chip() -> None:
    needs = [InstanceNeeds(name, kind) for name, kind in (("p", PREFILL), ("d-0", DECODE), ("d-1", DECODE))]
    found = host("fast small small").assign(needs)
    assert found.lease("p").chips == ("cuda:0",)
    long_answers = RequestWork(prompt_tokens=10, answer_tokens=2000)
    needs = [InstanceNeeds("p", PREFILL, work=long_answers), InstanceNeeds("d", DECODE, work=long_answers)]
    assert host("small fast").assign(needs).lease("d").chips == ("cuda:1",)


def test_groups_for_tensor_parallelism_are_equal_and_joined_best() -> None:
    needs = [InstanceNeeds("a", num_chips=2), InstanceNeeds("b", num_chips=2), InstanceNeeds("c")]
    found = host("fast fast fast fast small", islands=1).assign(needs)
    assert {found.lease(name).chips for name in "ab"} == {("cuda:0", "cuda:1"), ("cuda:2", "cuda:3")}
    assert found.lease("c").chips == ("cuda:4",)
    two_islands = host("fast fast fast fast", islands=2).assign([InstanceNeeds("a", num_chips=2)])
    assert two_islands.lease("a").chips in {("cuda:0", "cuda:1"), ("cuda:2", "cuda:3")}


def test_kind_names_and_memory_limit_the_choice() -> None:
    pool = host("fast npu small fast")
    needs = [
        InstanceNeeds("npu", kind=DeviceKind.NPU),
        InstanceNeeds("named", chip_names=frozenset({"cuda:2"})),
        InstanceNeeds("small", memory_bytes=10 * GIB),
        InstanceNeeds("large", memory_bytes=70 * GIB),
    ]
    with pytest.raises(CapacityError):
        pool.assign([*needs, InstanceNeeds("more", memory_bytes=70 * GIB)])
    found = pool.assign([needs[0], needs[1], needs[3]])
    assert [found.lease(name).chips for name in ("npu", "named", "large")] == [
        ("npu:0",), ("cuda:2",), ("cuda:0",),
    ]  # fmt: skip
    assert pool.assign(needs[2:]).lease("large").chips != ("cuda:1",)


def test_each_vendor_hides_the_other_chips() -> None:
    pool = host("fast npu fast")
    found = pool.assign([InstanceNeeds("gpu", kind=DeviceKind.GPU), InstanceNeeds("cpu", num_chips=0)])
    assert found.lease("gpu").environment == {
        "CUDA_VISIBLE_DEVICES": "0", "ASCEND_RT_VISIBLE_DEVICES": "", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }  # fmt: skip
    assert found.lease("cpu").environment["CUDA_VISIBLE_DEVICES"] == ""


def test_cores_are_own_and_near_or_shared() -> None:
    pool = host("fast fast", num_cores=8, num_nodes=2)
    found = pool.assign(
        [
            InstanceNeeds("far", chip_names=frozenset({"cuda:1"}), num_cores=2),
            InstanceNeeds("near", chip_names=frozenset({"cuda:0"})),
            InstanceNeeds("cpu", num_chips=0, num_cores=3),
        ]
    )
    far, near, cpu = (found.lease(name) for name in ("far", "near", "cpu"))
    assert far.cpus == {4, 5, 12, 13} and far.has_own_cores  # both hyperthreads of two cores of node 1
    assert cpu.chips == ("cpu:0",) and len(cpu.cores) == 3
    assert near.cpus == {3, 11} and not near.has_own_cores


def test_cpu_instances_share_a_node_by_memory() -> None:
    pool = host(num_cores=4, num_nodes=2, memory=10)
    needs = [InstanceNeeds(str(i), num_chips=0, num_cores=1, memory_bytes=6 * GIB) for i in range(2)]
    found = pool.assign(needs)
    assert {found.lease(str(i)).chips for i in range(2)} == {("cpu:0",), ("cpu:1",)}
    with pytest.raises(CapacityError, match="2 needs CPU cores with 6.0 GiB and 1 core"):
        pool.assign([*needs, InstanceNeeds("2", num_chips=0, num_cores=1, memory_bytes=6 * GIB)])


def test_more_instances_than_cores_share_them() -> None:
    pool = host(num_cores=2)
    found = pool.assign([InstanceNeeds(str(i), num_chips=0) for i in range(5)])
    assert all(lease.cpus == {0, 1, 2, 3} and not lease.has_own_cores for lease in found.leases)
    pool.reserve(found)
    with pytest.raises(CapacityError, match="0 core.s. are free"):
        pool.assign([InstanceNeeds("own", num_chips=0, num_cores=1)])
    assert pool.assign([InstanceNeeds("sixth", num_chips=0)]).lease("sixth").cpus == {0, 1, 2, 3}


def test_a_shared_chip_is_divided_by_memory() -> None:
    pool = host("fast")

    def part(name: str, gib: int) -> InstanceNeeds:
        return InstanceNeeds(name, is_exclusive=False, memory_bytes=gib * GIB)

    pool.reserve(pool.assign([part("a", 30), part("b", 40)]))
    pool.check()
    with pytest.raises(CapacityError, match="cuda:0 .of a, b, 10.0 GiB left."):
        pool.assign([part("c", 20)])
    with pytest.raises(CapacityError):
        pool.assign([InstanceNeeds("whole")])
    pool.release("b")
    pool.reserve(pool.assign([part("c", 20)]))
    pool.release("a"), pool.release("c")
    pool.reserve(pool.assign([InstanceNeeds("whole")]))
    with pytest.raises(CapacityError):
        pool.assign([part("d", 1)])


@pytest.mark.parametrize(
    ("models", "needs", "message"),
    [
        ("fast", [InstanceNeeds("a"), InstanceNeeds("b")], "1 of 2 instances have a place: fewer instances"),
        ("small", [InstanceNeeds("a", memory_bytes=20 * GIB)], "more of them for each instance"),
        ("", [InstanceNeeds("a")], "a needs 1 chip.s.; there is none"),
        ("fast small", [InstanceNeeds("a", num_chips=2)], "fewer chips for each"),
        ("fast", [InstanceNeeds("a", num_cores=9)], "9 core.s.; .* 8 core.s. are free"),
        ("fast", [InstanceNeeds("a", kind=DeviceKind.NPU)], "cuda:0 .not asked for, 80.0 GiB left."),
    ],
)
def test_a_refusal_says_what_is_there(models: str, needs: list[InstanceNeeds], message: str) -> None:
    pool = host(models)
    with pytest.raises(CapacityError, match=message):
        pool.assign(needs)
    assert not pool.leases


def test_names_own_their_lease() -> None:
    pool = host("fast fast")
    assignment = pool.assign([InstanceNeeds("a")])
    pool.reserve(assignment)
    with pytest.raises(ConfigError, match="names of their own"):
        pool.assign([InstanceNeeds("a")])
    with pytest.raises(ConfigError, match="names of their own"):
        pool.assign([InstanceNeeds("b"), InstanceNeeds("b")])
    with pytest.raises(BookkeepingError):
        pool.reserve(assignment)
    assert pool.release("a") and not pool.release("a")


def test_an_assignment_that_is_out_of_date_reserves_nothing() -> None:
    pool = host("fast small")
    both, late = pool.assign([InstanceNeeds("a"), InstanceNeeds("b")]), pool.assign([InstanceNeeds("c")])
    pool.reserve(late)
    with pytest.raises(BookkeepingError):
        pool.reserve(both)
    assert set(pool.leases) == {"c"}


@pytest.mark.parametrize(
    "values",
    [{"name": ""}, {"name": "a", "num_chips": -1}, {"name": "a", "is_exclusive": False}],
)
def test_needs_that_cannot_be(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="instance|not negative|shared chip"):
        InstanceNeeds(**values)  # type: ignore[arg-type]
