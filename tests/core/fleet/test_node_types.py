"""Which nodes are of one type, what they are called, and where they disagree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from factories import device_of_family
from hypothesis import given
from hypothesis import strategies as st

from autoprec.core.device.facts import GIB, DeviceFacts
from autoprec.core.fleet.node_types import NodeReport, NodeType, group_nodes, is_same_type

ZEN4, ZEN3, A100 = (device_of_family(name) for name in ("amd-zen4", "amd-zen3", "nvidia-a100"))


def device(facts: DeviceFacts, *, gib: float = 64, **fields: Any) -> DeviceFacts:
    seen = replace(facts.observation, memory_bytes=int(gib * GIB), hypothetical=False, **fields)
    return replace(facts, observation=seen)


def node(name: str, facts: DeviceFacts, **software: str) -> NodeReport:
    return NodeReport(node=name, name=name, facts=facts, software=software)


def nodes_of(kind: NodeType) -> list[str]:
    return [each.name for each in kind.nodes]


def test_nodes_with_the_same_fingerprint_are_of_one_type() -> None:
    zen4 = device(ZEN4, name="AMD EPYC 9R14")
    types = group_nodes([node("b", zen4), node("x", device(A100)), node("a", zen4)])
    assert [nodes_of(each) for each in types if "9r14" in each.name] == [["a", "b"]]
    assert len(types) == 2


def test_a_little_less_memory_is_the_same_type_and_the_least_of_it_counts() -> None:
    (kind,) = group_nodes(
        [node("a", device(ZEN4, gib=64)), node("b", device(ZEN4, gib=63)), node("c", device(ZEN4))]
    )
    assert kind.memory_bytes == 63 * GIB
    assert kind.fingerprint.memory_gib == 63
    assert len(group_nodes([node("a", device(ZEN4, gib=64)), node("b", device(ZEN4, gib=32))])) == 2


def test_another_quota_name_or_part_of_a_device_is_another_type() -> None:
    whole = device(ZEN4)
    for other in ({"core_quota": 4.0}, {"name": "AMD EPYC 9654"}, {"partition": "1g.5gb"}):
        assert len(group_nodes([node("a", whole), node("b", device(ZEN4, **other))])) == 2


def test_nodes_with_a_problem_are_of_no_type() -> None:
    broken = replace(node("b", device(ZEN4)), problem="it is switched off")
    unknown = NodeReport(node="c", name="c", problem="no answer")
    (kind,) = group_nodes([node("a", device(ZEN4)), broken, unknown])
    assert nodes_of(kind) == ["a"]
    assert group_nodes([broken]) == ()


def test_names_are_those_of_the_devices_without_what_is_no_name() -> None:
    xeon = device(ZEN4, name="Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz")
    (kind,) = group_nodes([node("a", xeon)])
    assert kind.name == "intel-xeon-platinum-8375c"
    (quota,) = group_nodes([node("a", device(ZEN4, name="AMD EPYC", core_quota=1.5))])
    assert quota.name == "amd-epyc-1-5-cores"


def test_types_with_one_name_are_told_apart_by_memory_then_by_family() -> None:
    small, large = device(A100, name="A100", gib=40), device(A100, name="A100", gib=80)
    assert {each.name for each in group_nodes([node("a", small), node("b", large)])} == {
        "a100-40gib",
        "a100-80gib",
    }
    alike = [device(ZEN4, name="AMD EPYC"), device(ZEN3, name="AMD EPYC")]
    names = {each.name for each in group_nodes([node("a", alike[0]), node("b", alike[1])])}
    assert names == {"amd-zen4-amd-epyc-64gib", "amd-zen3-amd-epyc-64gib"}


def test_what_differs_within_a_type_is_told_and_the_most_common_comes_first() -> None:
    zen4 = device(ZEN4)
    reports = [
        node("a", zen4, torch="2.12.0"),
        node("b", zen4, torch="2.13.0"),
        node("c", zen4, torch="2.13.0"),
    ]
    (kind,) = group_nodes(reports)
    assert nodes_of(kind) == ["b", "c", "a"]
    assert kind.disagreements == ("torch: 2.13.0 on b, c; 2.12.0 on a",)
    old = device(A100, driver="550.1")
    (cards,) = group_nodes([node("a", old), node("b", device(A100, driver="570.2"))])
    assert cards.disagreements == ("driver: 550.1 on a; 570.2 on b",)


def test_nodes_that_agree_have_no_disagreements() -> None:
    (kind,) = group_nodes([node(name, device(ZEN4), torch="2.13.0") for name in "ab"])
    assert kind.disagreements == ()


DEVICES = st.builds(
    device,
    st.sampled_from([ZEN4, ZEN3, A100]),
    gib=st.sampled_from([16, 40, 64]),
    name=st.sampled_from(["", "AMD EPYC", "A100"]),
    core_quota=st.sampled_from([None, 2.0]),
    partition=st.sampled_from(["", "1g.5gb"]),
)


@given(st.lists(DEVICES, max_size=8))
def test_every_node_is_of_exactly_one_type_and_names_are_unique(found: list[DeviceFacts]) -> None:
    reports = [node(f"n{number}", each) for number, each in enumerate(found)]
    types = group_nodes(reports)
    assert sorted(name for each in types for name in nodes_of(each)) == sorted(
        each.name for each in reports
    )
    assert len({each.name for each in types}) == len(types)
    for kind in types:
        assert kind.name.replace("-", "").isalnum()
        assert all(
            is_same_type(each.facts.fingerprint, kind.fingerprint)
            for each in kind.nodes
            if each.facts
        )


@given(st.lists(DEVICES, max_size=6), st.randoms())
def test_the_order_of_the_nodes_does_not_matter(found: list[DeviceFacts], random: Any) -> None:
    reports = [node(f"n{number}", each) for number, each in enumerate(found)]
    shuffled = list(reports)
    random.shuffle(shuffled)
    assert group_nodes(shuffled) == group_nodes(reports)
