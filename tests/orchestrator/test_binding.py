"""Which node carries which processes, and with what environment."""

import dataclasses

import pytest

from prl.cluster.allocation import Allocation, Host
from prl.cluster.split import make_split
from prl.config.load import replace
from prl.config.schema import Config
from prl.domains.options import DomainOptions
from prl.orchestrator.binding import Plan, bind


def bound(nodes: int | None = None, **sections: dict) -> Plan:
    config = replace(dataclasses.replace(Config(), domains=(DomainOptions(name="digits"),)), **sections)
    split = make_split(replace(config, cluster={"nodes": nodes}))
    names = iter(f"10.0.0.{number}" for number in range(1, 100))
    hosts = tuple(tuple(Host(name, name) for name in (next(names) for _ in range(part.nodes))) for part in split.components)
    allocation = Allocation(None, 0, 0, hosts)
    return bind(config, split, allocation, 1)


@pytest.mark.parametrize(
    ("nodes", "sections", "yields"),
    [
        (None, {}, True),  # samplers on the same cores
        (None, {"train": {"yields_cpu": False}}, False),
        (2, {}, False),  # the samplers are on the other node
        (None, {"cluster": {"gpus_per_node": 2}}, False),
    ],
)
def test_trainers_yield_the_cpu_to_samplers_on_the_same_cores(nodes, sections, yields):
    children = bound(nodes, **sections).children
    assert {child.role for child in children} >= {"trainer", "sampler", "actor", "preprocess"}
    told = {child.role for child in children if "PRL_YIELDS_CPU" in child.environment}
    assert told == ({"trainer"} if yields else set())


@pytest.mark.parametrize(
    ("cluster", "near"),
    [
        ({"gpus_per_node": 2}, {"trainer", "sampler"}),
        ({"gpus_per_node": 2, "bind_cpus": "never"}, set()),
        ({}, set()),  # without accelerators
    ],
)
def test_processes_with_accelerators_are_to_run_near_these(cluster, near):
    children = bound(cluster=cluster).children
    assert {child.role for child in children} >= {"trainer", "sampler", "actor", "preprocess"}
    assert {child.role for child in children if child.near_devices} == near
