"""What is asked of Slurm: sbatch's options for each component, and srun's; names that it has not are refused, with the nearest
one."""

import shutil

import pytest

from prl.cluster.option_names import listed, parse_help
from prl.cluster.requests import request_problems, requests
from prl.cluster.run import Output, ProgramError, run
from prl.cluster.split import make_split
from prl.config.load import replace
from prl.config.schema import Config

HELP = """Usage: sbatch [OPTIONS(0)...] [ : [OPTIONS(N)...]] script(0) [args(0)...]

Parallel run options:
  -a, --array=indexes         job array index values
      --begin=time            defer job until HH:MM MM/DD/YY, see --deadline
  -B  --extra-node-info=S[:C[:T]]  combine request of sockets per node

Options provided by plugins:
      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH
                              [pyxis] the image to use for the container
      --uenv=<file>[:mount-point][,<file:mount-point>]*
"""


def asked(nodes=3, **cluster):
    config = replace(Config(), cluster={"nodes": nodes, **cluster})
    return requests(config, make_split(config))


def problems(nodes=3, runner=None, **cluster):
    config = replace(Config(), cluster={"nodes": nodes, **cluster})
    return list(request_problems(config, make_split(config), runner or (lambda *_, **__: Output(0, HELP, ""))))


def test_components_may_ask_for_different_things():
    both = {"partition": "a100", "account": "me", "memory_per_node_gib": 1.5, "time_min": 90}
    own = {"partition": "h200", "mem": "900G", "constraint": "big", "exclusive": False}
    train, sample = asked(**both, sbatch={"constraint": "any", "exclusive": True}, sbatch_train=own)
    assert (train.component, train.nodes, sample.component, sample.nodes) == ("train", 1, "sample", 2)
    assert dict(train.options) == {
        **{"nodes": 1, "ntasks-per-node": 1, "time": 90, "partition": "h200", "account": "me", "mem": "900G"},
        "constraint": "big",
    }
    assert dict(sample.options) == {
        **{"nodes": 2, "ntasks-per-node": 1, "time": 90, "partition": "a100", "account": "me", "mem": "1536M"},
        **{"constraint": "any", "exclusive": True},
    }
    assert (train.partition, train.memory_mib, sample.memory_mib) == ("h200", 900 * 1024, 1536)


@pytest.mark.parametrize(
    ("keys", "option"),
    [
        ({}, {"gpus-per-node": 4}),
        ({"gpu_type": "h100"}, {"gpus-per-node": "h100:4"}),
        ({"gpu_request": "gres"}, {"gres": "gpu:4"}),
        ({"gpu_request": "gres", "gpu_type": "h100", "sbatch": {"gres": "nvme:1"}}, {"gres": "gpu:h100:4,nvme:1"}),
        (
            {"gpu_request": "gres", "mode": "plain", "sbatch": {"gres": False}},
            {"gres": "gpu:4"},
        ),
        ({"gpu_request": "none"}, {}),
    ],
)
def test_sites_ask_for_accelerators_in_their_own_ways(keys, option):
    (request,) = asked(nodes=1, gpus_per_node=4, **keys)
    assert {name: value for name, value in request.options.items() if "g" in name} == option
    assert request.gpus == (4 if option else 0)


def test_a_homogeneous_job_asks_once_for_all_nodes():
    (request,) = asked(nodes=5, mode="plain", train_nodes=2)
    assert (request.component, request.nodes, request.options["nodes"]) == ("all", 5, 5)


def test_a_component_may_have_other_generic_resources_or_none_of_what_all_ask_for():
    both = {"gpus_per_node": 4, "gpu_request": "gres", "cpus_per_node": 8, "memory_per_node_gib": 2}
    own = {"sbatch_train": {"gres": "nvme:2", "mem": False}, "sbatch_sample": {"--gres": False, "cpus_per_task": False}}
    assert problems(**both, **own) == []
    train, sample = asked(**both, sbatch={"gres": "nvme:1"}, **own)
    assert (train.options["gres"], sample.options["gres"]) == ("gpu:4,nvme:2", "gpu:4")
    assert ("mem" in train.options, train.cpus, train.memory_mib) == (False, 8, 0)
    assert ("cpus-per-task" in sample.options, sample.cpus, sample.memory_mib) == (False, 0, 2048)


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"partition": "a,,b c"}, "cluster.partition = a,,b c: holds a blank, which no name in Slurm does"),
        ({"partition": "a, b"}, "cluster.partition = a, b: holds a blank"),
        ({"partition": "a,,b"}, "cluster.partition = a,,b: a comma too many, as one of its names is empty; take it out"),
        ({"partition": ",a"}, "cluster.partition = ,a: a comma too many"),
        ({"account": "my project"}, "cluster.account = my project: holds a blank"),
        ({"account": "a,b"}, "cluster.account = a,b: one name is wanted, found a comma"),
        ({"qos": "high,"}, "cluster.qos = high,: a comma too many"),
        ({"sbatch": {"constraint": "a100 b"}}, "cluster.sbatch.constraint = a100 b: holds a blank"),
        ({"sbatch": {"constraint": "(a&b)||c"}}, "cluster.sbatch.constraint = (a&b)||c: an operator too many"),
        ({"sbatch": {"--constraint": "a&"}}, "cluster.sbatch.--constraint = a&: an operator too many"),
        ({"sbatch_train": {"partition": "a,"}}, "cluster.sbatch_train.partition = a,: a comma too many"),
    ],
)
def test_names_that_slurm_cannot_have(cluster, words):
    (line,) = problems(**cluster)
    assert line.startswith(words)


@pytest.mark.parametrize("constraint", ["a100", "a&b", "[rack1|rack2]", "(a|b)&c", "[a*2&b*1]", "gpu&hbm80g"])
def test_names_that_it_can_have(constraint):
    both = {"partition": "a,b", "account": "PROJECT@h100", "qos": "qos_gpu-t3"}
    assert problems(**both, sbatch={"constraint": constraint}, sbatch_sample={"partition": "c"}) == []


def test_a_run_on_this_machine_asks_for_nothing():
    assert problems(nodes=None, sbatch_train={"partition": "p"}, sbatch_sample={"mem": "9G"}) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"constrain": "h100"}, "cluster.sbatch.constrain: sbatch has no such option; did you mean constraint?"),
        ({"C": "h100"}, "cluster.sbatch.C: sbatch has no such option; write its long name, constraint"),
        ({"-x": "n3"}, "cluster.sbatch.-x: sbatch has no such option; write its long name, exclude"),
        ({"container-imag": "x"}, "cluster.sbatch.container-imag: sbatch has no such option; did you mean container-image?"),
        ({"mem_per_node": "9G"}, "cluster.sbatch.mem_per_node: sbatch has no such option; did you mean mem?"),
        ({"gpus-per-nod": 1}, "cluster.sbatch.gpus-per-nod: sbatch has no such option; did you mean gpus-per-node?"),
        ({"foo bar": 1}, "cluster.sbatch.foo bar: sbatch has no such option; sbatch --help lists them"),
        ({"partition": "x"}, "cluster.sbatch.partition: has a key of its own, cluster.partition"),
        ({"gpus_per_node": 1}, "cluster.sbatch.gpus_per_node: has a key of its own, cluster.gpus_per_node"),
        ({"--time": 1}, "cluster.sbatch.--time: has a key of its own, cluster.time_min"),
        ({"gres": "gpu:2"}, "cluster.sbatch.gres = gpu:2: accelerators are asked for by cluster.gpus_per_node, in the way"),
        ({"array": "1-3"}, "cluster.sbatch.array: is set by prl-submit and cannot be changed: a run is one job"),
        ({"output": "x"}, "cluster.sbatch.output: is set by prl-submit and cannot be changed"),
        ({"--requeue": True}, "cluster.sbatch.--requeue: has a key of its own, cluster.requeue"),
        ({"signal": "TERM"}, "cluster.sbatch.signal: has a key of its own, cluster.warning_s"),
        ({"clusters": "b"}, "cluster.sbatch.clusters: prl asks the cluster of the login node"),
    ],
)
def test_options_that_cannot_be(options, words):
    (line,) = problems(sbatch=options)
    assert line.startswith(words)


def test_every_bad_option_is_told_at_once_and_those_of_the_sites_plugins_are_good():
    assert problems(sbatch={"uenv": "x", "container-image": "y", "hint": "nomultithread", "tres_per_task": "cpu:1"}) == []
    told = problems(
        sbatch={"outptu": 1}, sbatch_train={"tmie": 1, "partition": "p"}, sbatch_sample={"mem": "much", "cpus_per_task": "all"}
    )
    assert [line.split(":")[0] for line in told] == [
        *(
            "cluster.sbatch.outptu",
            "cluster.sbatch_train.tmie",
            "cluster.sbatch_sample.cpus-per-task = all",
            "cluster.sbatch_sample.mem = much",
        )
    ]
    (line,) = problems(nodes=1, sbatch_train={"partition": "p"})
    assert line.startswith("cluster.sbatch_train: is for one component of a heterogeneous job, which this is not (plain)")


def test_sbatch_is_asked_only_where_the_list_is_not_enough():
    def missing(*_, **__):
        raise ProgramError("sbatch: no such program on PATH")

    assert problems(runner=missing, sbatch={"constraint": "h100"}) == []
    (line,) = problems(runner=missing, sbatch={"uenv": "x"})
    assert line == (
        "cluster.sbatch.uenv: sbatch has no such option; sbatch --help lists them (an option of this site's alone would need "
        "its sbatch, but sbatch: no such program on PATH)"
    )


def test_what_sbatch_complains_of_is_left_out_of_what_is_said_of_a_name():
    noise = "sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\nsbatch: fatal: Could not establish\n"
    (line,) = problems(runner=lambda *_, **__: Output(1, "", noise), sbatch={"constrant": "x"})
    assert line == (
        "cluster.sbatch.constrant: sbatch has no such option; did you mean constraint? (an option of this site's alone would "
        "need its sbatch, but sbatch --help ends with exit code 1 here)"
    )


def test_lines_of_the_setup_that_bash_cannot_read_are_told_before_the_job_waits():
    assert problems(setup=["if true; then", "  . env; fi", "f() { echo 'a b'; }"], runner=run) == []
    (line,) = problems(setup=["ulimit -n 9", 'echo "open'], runner=run)
    assert line.startswith("cluster.setup: bash cannot read these lines: ")
    assert "line 2: unexpected EOF while looking for matching" in line


def test_names_in_the_help_of_sbatch():
    assert parse_help(HELP) == {"array", "begin", "extra-node-info", "container-image", "uenv"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"netwrok": "x"}, "cluster.srun.netwrok: srun has no such option; did you mean network?"),
        ({"cpu_bnid": "x"}, "cluster.srun.cpu_bnid: srun has no such option; did you mean cpu-bind?"),
        ({"K": 1}, "cluster.srun.K: srun has no such option; write its long name, kill-on-bad-exit"),
        ({"wrap": "ls"}, "cluster.srun.wrap: srun has no such option"),
        ({"x; touch y": 1}, "cluster.srun.x; touch y: srun has no such option; srun --help lists them"),
        ({"het_group": 0}, "cluster.srun.het_group: is set by prl-submit and cannot be changed"),
        ({"container-image": "x"}, "cluster.srun.container-image: is set by prl-submit and cannot be changed"),
    ],
)
def test_options_that_the_step_cannot_have(options, words):
    (line,) = problems(srun=options)
    assert line.startswith(words)


def test_srun_itself_is_asked_for_what_its_plugins_add():
    asked = []

    def answer(arguments, **_):
        asked.append(arguments)
        return Output(0, HELP, "")

    assert problems(runner=answer, srun={"network": "disable_rdzv_get", "--mem_bind": "local", "exact": True}) == []
    assert asked == []
    assert problems(runner=answer, srun={"uenv": "x"}) == []
    assert asked == [["srun", "--help"]]


@pytest.fixture
def without_a_cluster(tmp_path, monkeypatch):
    """Where Slurm's programs print their help: they read a configuration first."""
    if shutil.which("srun") is None:
        pytest.skip("there is no Slurm here")
    (tmp_path / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))


@pytest.mark.parametrize("program", ["sbatch", "srun"])
def test_the_lists_have_what_the_programs_here_have(without_a_cluster, program):
    said = run([program, "--help"], timeout_s=30.0).out
    names = parse_help(said)
    assert len(names) > 90
    assert names <= listed(program).keys()


def test_the_srun_here_takes_an_option_that_its_help_leaves_out_and_no_other(without_a_cluster):
    assert run(["srun", "--network=x", "--help"], timeout_s=30.0).out
    with pytest.raises(ProgramError, match="unrecognized option '--netwrok=x'"):
        run(["srun", "--netwrok=x", "--help"], timeout_s=30.0)
