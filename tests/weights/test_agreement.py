"""What two sides say of themselves, compared."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prl.weights.agreement import HARMLESS, Facts, check_agreement, differences, facts, tensors_digest
from prl.weights.plan import TensorSpec

TENSORS = [TensorSpec("a", "bfloat16", (4, 3)), TensorSpec("b", "bfloat16", (5,))]


def side(who="the trainer", host="node1", torch="2.9.0+cu128", tensors=TENSORS, dtype="bfloat16", **environment):
    libraries = {"torch": torch, "library": "NCCL", "NCCL": "2.27.5"}
    return facts(
        who,
        host,
        libraries=libraries,
        dtype=dtype,
        tensors=tensors,
        bucket_bytes=2**28,
        environment={"HOME": who, **environment},
    )


def test_sides_that_are_alike_agree_whatever_else_their_environment_holds():
    assert check_agreement(side(), side("sampler 0", "node2", "2.9.0")) == ""


def test_each_difference_is_named_with_its_sides_and_what_to_do():
    ours = side(NCCL_CUMEM_ENABLE="0", NCCL_ALGO="Ring")
    theirs = side("sampler 3", "node2", torch="2.8.0", dtype="float32", NCCL_CUMEM_ENABLE="1", GLOO_SOCKET_IFNAME="ib1")
    with pytest.raises(ValueError, match="these differ") as refused:
        check_agreement(ours, theirs)
    assert str(refused.value) == (
        "these differ: "
        "NCCL_ALGO is Ring at the trainer on node1 and not set at sampler 3 on node2: set it alike on all nodes, in "
        "cluster.setup; "
        "NCCL_CUMEM_ENABLE is 0 at the trainer on node1 and 1 at sampler 3 on node2: set it alike on all nodes, in "
        "cluster.setup; "
        "dtype is bfloat16 at the trainer on node1 and float32 at sampler 3 on node2: start both from the same run folder; "
        "torch is 2.9.0+cu128 at the trainer on node1 and 2.8.0 at sampler 3 on node2: install the same version on all nodes "
        "of both components"
    )


def test_another_plan_of_lanes_or_none_is_named():
    alike = {"libraries": {}, "dtype": "float32", "tensors": [], "bucket_bytes": 1, "environment": {}}
    ours, theirs, none = (facts(who, "node", **alike, plan=plan) for who, plan in (("a", "x"), ("b", "y"), ("c", "")))
    assert check_agreement(ours, ours) == check_agreement(none, none) == ""
    for other, words in ((theirs, "y at b"), (none, "not set at c")):
        with pytest.raises(ValueError, match=f"plan is x at a on node and {words} on node: see that all nodes read the same"):
            check_agreement(ours, other)


def test_what_may_differ_is_said_with_its_reason():
    words = check_agreement(side(GLOO_SOCKET_IFNAME="eth0"), side("sampler 0", "node2", GLOO_SOCKET_IFNAME="ib1"))
    assert words == (
        "GLOO_SOCKET_IFNAME is eth0 at the trainer on node1 and ib1 at sampler 0 on node2: it names what lies on a node, which "
        "may be called otherwise on another one"
    )


@pytest.mark.parametrize(
    "tensors",
    [
        TENSORS[:1],
        TENSORS[::-1],
        [TensorSpec("a", "bfloat16", (3, 4)), TENSORS[1]],
        [TensorSpec("a", "float16", (4, 3)), TENSORS[1]],
        [TensorSpec("c", "bfloat16", (4, 3)), TENSORS[1]],
    ],
    ids=["fewer", "another order", "another shape", "another dtype", "another name"],
)
def test_another_list_of_tensors_is_seen(tensors):
    assert tensors_digest(tensors) != tensors_digest(TENSORS)
    assert [one.name for one in differences(side(tensors=tensors), side())] == ["tensors"]


settings_of = st.dictionaries(st.sampled_from(["NCCL_A", "NCCL_DEBUG", "GLOO_B", "dtype"]), st.sampled_from(["0", "1"]))


@given(settings_of, settings_of)
def test_the_order_of_the_sides_does_not_matter_and_nothing_is_passed_over(one, other):
    ours, theirs = (Facts(who=who, host=who, settings=values) for who, values in (("a", one), ("b", other)))
    found = differences(ours, theirs)
    assert {d.name for d in found} == {name for name in {*one, *other} if one.get(name) != other.get(name)}
    assert [(d.name, d.theirs, d.ours) for d in differences(theirs, ours)] == [(d.name, d.ours, d.theirs) for d in found]
    assert all(bool(d.harmless) == (d.name in HARMLESS) for d in found)


@pytest.mark.parametrize(
    "value", [None, {}, {"who": "a", "host": "b", "settings": {"c": 1}}, {"who": 1, "host": "b", "settings": {}}]
)
def test_facts_that_are_none_are_refused(value):
    with pytest.raises(ValueError, match="facts: expected"):
        Facts.from_json(value)


def test_facts_survive_the_wire():
    assert Facts.from_json(side().to_json()) == side()
