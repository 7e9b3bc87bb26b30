import pytest

from prl.cluster.allocation import Allocation, AllocationError, Host, read_allocation

A, B, C = Host("n3", "10.0.0.3"), Host("n1", "10.0.0.1"), Host("n2", "10.0.0.2")
HET = {"PRL_NODES_0": "n3=10.0.0.3", "PRL_NODES_1": "n1=10.0.0.1,n2=10.0.0.2", "SLURM_JOB_ID": "7"}


def test_without_slurm_the_one_node_is_this_machine():
    assert read_allocation({}) == Allocation(None, 0, 0, ((Host("localhost", "127.0.0.1"),),))


@pytest.mark.parametrize(("task", "component", "rank", "host"), [(0, 0, 0, A), (1, 1, 0, B), (2, 1, 1, C)])
def test_tasks_are_numbered_over_the_components(task, component, rank, host):
    found = read_allocation({**HET, "SLURM_PROCID": str(task), "SLURMD_NODENAME": host.name})
    assert found == Allocation("7", component, rank, ((A,), (B, C)))
    assert (found.host, found.task, found.first, found.master_address) == (host, task, task == 0, "10.0.0.3")


def test_a_job_that_was_put_into_the_queue_again_knows_how_often():
    assert read_allocation({**HET, "SLURM_PROCID": "0"}).restarts == 0
    assert read_allocation({**HET, "SLURM_PROCID": "0", "SLURM_RESTART_COUNT": "2"}).restarts == 2


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"SLURM_PROCID": "3"}, "task 3 is beyond"),
        ({"SLURM_PROCID": "1", "SLURMD_NODENAME": "n2"}, "task 1 runs on node n2, but the batch script counted n1"),
        ({"SLURM_PROCID": "0", "PRL_NODES_0": ""}, "not a list of name=address pairs: ''"),
        ({"SLURM_PROCID": "0", "PRL_NODES_0": "n3=nowhere.invalid"}, "'nowhere.invalid' does not resolve"),
    ],
)
def test_an_environment_that_does_not_fit_together_is_an_error(changed, words):
    with pytest.raises(AllocationError, match=words):
        read_allocation({**HET, **changed})
