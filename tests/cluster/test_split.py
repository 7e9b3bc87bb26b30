import pytest

from prl.cluster.split import Component, NodeShare, make_split
from prl.config.load import ConfigError, replace
from prl.config.schema import Config


def config(**keys):
    """Config with keys of the form section__key."""
    sections: dict[str, dict] = {}
    for name, value in keys.items():
        section, key = name.split("__")
        sections.setdefault(section, {})[key] = value
    return replace(Config(), **sections)


def split(config, nodes=None):
    return make_split(config if nodes is None else replace(config, cluster={"nodes": nodes}))


def share(ranks, trainer_devices, replica_devices):
    return NodeShare(ranks, trainer_devices, len(replica_devices), replica_devices)


def test_without_slurm_and_without_accelerators():
    found = split(config(train__tensor_parallel=2))
    assert found.kind == "local"
    assert found.components == (Component("all", 1, share(2, (), ((),))),)
    assert (found.nodes, found.world_size, found.data_parallel, found.replicas) == (1, 2, 1, 1)


def test_more_training_processes_than_tensor_parallel_are_data_parallel():
    found = split(config(train__tensor_parallel=2, cluster__train_devices=4, cluster__replicas_per_node=2))
    assert (found.world_size, found.data_parallel, found.replicas) == (4, 2, 2)


def test_a_model_is_shared_by_tensor_pipeline_and_expert_ranks():
    """As many processes as one model needs, where no number is given; the rest is data parallelism."""
    found = split(config(train__tensor_parallel=2, train__pipeline_parallel=2))
    assert (found.world_size, found.data_parallel) == (4, 1)
    found = split(config(train__pipeline_parallel=2, cluster__train_devices=6))
    assert (found.world_size, found.data_parallel) == (6, 3)
    found = split(config(train__tensor_parallel=2, train__expert_parallel=4))
    assert (found.world_size, found.data_parallel) == (4, 2)
    assert "4 trainer ranks (tensor parallel 2 x data parallel 2, expert parallel 4)" in found.describe()


def test_pipeline_stages_may_lie_on_several_nodes():
    keys = {"cluster__gpus_per_node": 4, "train__tensor_parallel": 4, "train__pipeline_parallel": 2}
    found = split(config(**keys, cluster__train_nodes=4), nodes=6)
    assert (found.world_size, found.data_parallel) == (16, 2)
    with pytest.raises(ConfigError, match=r"train_nodes = 3: 12 trainer ranks, 4 a node, must be a multiple of 8.*pipeline"):
        split(config(**keys, cluster__train_nodes=3), nodes=6)
    stages = config(train__tensor_parallel=2, train__pipeline_parallel=2, cluster__train_nodes=2)
    assert [c.node.trainer_ranks for c in split(stages, nodes=3).components] == [2, 0]  # on CPUs a stage a node


def test_one_node_of_eight_accelerators_is_divided_by_device():
    found = split(config(cluster__gpus_per_node=8, train__tensor_parallel=4, sample__tensor_parallel=2), nodes=1)
    assert found.kind == "plain"
    assert found.components == (Component("all", 1, share(4, (0, 1, 2, 3), ((4, 5), (6, 7)))),)


def test_fewer_samplers_than_fit():
    found = split(config(cluster__gpus_per_node=8, cluster__replicas_per_node=3), nodes=1)
    assert found.components[0].node == share(1, (0,), ((1,), (2,), (3,)))


def test_eight_nodes_of_eight_accelerators():
    found = split(
        config(
            cluster__gpus_per_node=8,
            cluster__nodes=8,
            cluster__train_nodes=3,
            train__tensor_parallel=4,
            sample__tensor_parallel=2,
        )
    )
    assert found.kind == "het"
    assert found.components == (
        Component("train", 3, share(8, tuple(range(8)), ())),
        Component("sample", 5, share(0, (), ((0, 1), (2, 3), (4, 5), (6, 7)))),
    )
    assert (found.nodes, found.world_size, found.data_parallel, found.replicas) == (8, 24, 6, 20)


def test_three_nodes_without_accelerators():
    found = split(config(train__tensor_parallel=2), nodes=3)
    assert [(c.name, c.nodes, c.node.trainer_ranks, c.node.replicas) for c in found.components] == [
        ("train", 1, 2, 0),
        ("sample", 2, 0, 1),
    ]


@pytest.mark.parametrize(
    ("nodes", "keys", "words"),
    [
        (0, {}, "cluster.nodes = 0.*at least 1"),
        (2, {"cluster__train_nodes": 2}, "cluster.train_nodes = 2: of 2 nodes.*at least 3 nodes"),
        (3, {"cluster__train_nodes": 0}, "cluster.train_nodes = 0"),
        (None, {"cluster__train_nodes": 2}, "cluster.train_nodes = 2: with one node"),
        (1, {"cluster__gpus_per_node": 4, "train__tensor_parallel": 4}, "4 to train and 1 for one sampler.*2 nodes"),
        (2, {"cluster__gpus_per_node": 4, "train__tensor_parallel": 8}, "train.tensor_parallel = 8: must divide.*= 4"),
        (2, {"cluster__gpus_per_node": 4, "train__tensor_parallel": 3}, "train.tensor_parallel = 3: must divide.*= 4"),
        (2, {"cluster__gpus_per_node": 4, "sample__tensor_parallel": 8}, "room for 0 samplers of sample.tensor_parallel = 8"),
        (2, {"cluster__gpus_per_node": 4, "cluster__train_devices": 2}, "cluster.train_devices = 2.*leave it null"),
        (1, {"cluster__gpus_per_node": 4, "cluster__replicas_per_node": 4}, "room for 3 samplers.*not for 4"),
        (None, {"train__tensor_parallel": 2, "cluster__train_devices": 3}, "train_devices = 3: must be a multiple of.*= 2"),
        (
            None,
            {"train__tensor_parallel": 2, "train__pipeline_parallel": 2, "cluster__train_devices": 6},
            "train_devices = 6: must be a multiple of train.tensor_parallel x train.pipeline_parallel = 4",
        ),
        (None, {"cluster__replicas_per_node": 0}, "replicas_per_node = 0"),
        (None, {"train__tensor_parallel": 0}, "must be at least 1"),
        (30, {"run__groups_per_step": 4}, r"30 nodes hold 29 samplers.*at most 20 groups.*run.max_lag \+ 1"),
        (30, {"run__groups_per_step": 4, "run__mode": "conventional"}, "at most 16 groups.*steps_per_generation"),
        (
            9,
            {"cluster__train_nodes": 8, "run__groups_per_step": 2, "run__rollouts_per_group": 2},
            "data parallel 8, but a step has 4 rollouts",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_number_and_the_way_out(nodes, keys, words):
    with pytest.raises(ConfigError, match=words):
        split(config(**keys), nodes=nodes)


def test_the_description_names_devices_and_counts():
    text = split(config(cluster__gpus_per_node=4, train__tensor_parallel=2, sample__tensor_parallel=2), nodes=2).describe()
    assert "2 nodes, a heterogeneous Slurm job" in text
    assert "train  1 node, each: 4 trainer ranks on devices 0-3" in text
    assert "sample 1 node, each: 2 samplers on devices 0-1 | 2-3" in text
    assert "4 trainer ranks (tensor parallel 2 x data parallel 2), 2 samplers (tensor parallel 2)" in text


def test_a_replay_has_no_samplers():
    found = split(config(cluster__gpus_per_node=2, train__tensor_parallel=2, run__replay="r"), nodes=1)
    assert found.components == (Component("all", 1, share(2, (0, 1), ())),)
    with pytest.raises(ConfigError, match="2 to train"):
        split(config(cluster__gpus_per_node=1, train__tensor_parallel=2, run__replay="r"), nodes=1)
    with pytest.raises(ConfigError, match="runs on one node"):
        split(config(run__replay="r"), nodes=2)
