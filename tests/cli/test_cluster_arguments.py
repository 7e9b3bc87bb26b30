"""Where a run runs: the command line, the mode, the site's profile and the configuration, in this order."""

import pytest
from stand_ins import stand_in
from submitting import checkpoint

from prl.cli import plan, submit
from prl.cluster import claims
from prl.config.load import load

PYXIS = ("cluster.container=pyxis", "cluster.container_image=a")
PROFILE = """
cluster:  # of a site
  partition: gpu
  account: site
  time_min: 30
  sbatch: {constraint: h100, hint: nomultithread}
  modules: [cuda/12.8]
"""


def directives(text):
    return [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH --")]


def test_the_command_line_counts_more_than_the_configuration_and_that_more_than_the_sites_profile(config, capsys):
    (config / "site.yaml").write_text(PROFILE)
    over = ["cluster.profile=site.yaml", "cluster.account=mine", "cluster.sbatch={constraint: a100}"]
    arguments = ["--nodes", "5", "--trainer-nodes", "2", "--time", "1-12:00:00", "--qos", "high", "--exclude", "n3,n7"]
    assert submit.main(["c.yaml", "--dry-run", *arguments, "--set", *over]) == 0
    out = capsys.readouterr().out
    options = directives(out)
    half = options[5:]
    wanted = ["ntasks-per-node=1", "time=2160", "partition=gpu", "account=mine", "qos=high", "constraint=a100"]
    wanted += ["hint=nomultithread", "exclude=n3,n7"]
    assert half == ["nodes=2", *wanted, "nodes=3", *wanted]
    assert "\nmodule load cuda/12.8\n" in out
    assert "at the time limit of 2160 minutes it has used 180 node-hours\n" in out  # 5 nodes of 36 hours
    assert submit.main(["c.yaml", "--dry-run", "--nodes", "3", "--partition", "p", "--account", "a", "--set", over[0]]) == 0
    assert {"partition=p", "account=a", "time=30", "constraint=h100"} <= set(directives(capsys.readouterr().out))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "cluster: {partition: gpu, partitoin: x}\n",
            "site.yaml: unknown key cluster.partitoin; did you mean ",
        ),
        ("cluster: {warning_s: 0}\n", "site.yaml: cluster.warning_s = 0: must be at least 1 and below 65536"),
        ("run: {steps: 3}\n", "site.yaml must hold the section cluster: alone, found run"),
        ("- 1\n", "expected sections such as run: and model:, found a list"),
        (None, "cluster.profile = site.yaml: no such profile; there are alps, della, frontier, jean-zay-h100, "),
    ],
)
def test_a_profile_that_is_none(config, capsys, text, words):
    if text is not None:
        (config / "site.yaml").write_text(text)
    assert submit.main(["c.yaml", "--dry-run", "--set", "cluster.profile=site.yaml"]) == 2
    assert words in capsys.readouterr().err


def test_a_runs_own_configuration_needs_no_profile_any_more(config):
    (config / "site.yaml").write_text(PROFILE)
    (config / "run.yaml").write_text("cluster: {profile: site.yaml, partition: other}\n")
    assert load("run.yaml", (), config).cluster.account == "site"
    assert load("run.yaml").cluster.account is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "3", "--time", "soon"], "--time: 'soon' is no time limit; write minutes, or e.g. 12:00:00"),
        (["--nodes", "3", "--time", "infinite"], "--time infinite: a run needs a time limit"),
        (["--set", "cluster.mode=het"], "cluster.mode = het: a Slurm job needs a number of nodes: --nodes N"),
        (["--set", "cluster.mode=het", "cluster.nodes=1"], "cluster.mode = het: one node is one component; ask for 2"),
        (["--nodes", "0"], "cluster.nodes = 0: must be at least 1"),
        (["--nodes", "3", "--trainer-nodes", "3"], "cluster.train_nodes = 3: of 3 nodes at least 1 must train"),
        (
            ["--nodes", "2", "--set", "cluster.container=pyxis"],
            "cluster.container_image = null: cluster.container = pyxis ",
        ),
        (
            ["--nodes", "2", "--set", "cluster.container=apptainer", "cluster.container_image=''"],
            "cluster.container_image = '': cluster.container = apptainer ",
        ),
        *(
            (
                ["--nodes", "2", "--set", *PYXIS, f"cluster.container_mounts=['{mount}']"],
                f"cluster.container_mounts[0] = {mount}: the container sees folders under absolute paths",
            )
            for mount in ("", "data", "~/data", "/data:data", "/data:")
        ),
        (
            ["--set", "cluster.container=apptainer", "cluster.container_image=a.sif"],
            "cluster.container = apptainer: is for ",
        ),
        (["--set", "cluster.container_image=a.sif"], "cluster.container_image = a.sif: set cluster.container to pyxis"),
        (["--set", "cluster.environment.PYTHONPATH=x"], "cluster.environment.PYTHONPATH: is no name of a variable, or of one"),
        (["--set", "cluster.srun.het-group=1"], "cluster.srun.het-group: is set by prl-submit and cannot be ch"),
        (
            ["--nodes", "3", "--set", "cluster.srun.netwrok=x"],
            "cluster.srun.netwrok: srun has no such option; did you mean network?",
        ),
        (["--nodes", "1", "--set", "cluster.sbatch_train.partition=a"], "cluster.sbatch_train: is for one component of a het"),
    ],
)
def test_what_cannot_be(config, capsys, arguments, words):
    assert submit.main(["c.yaml", "--dry-run", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "cluster.nodes=1"], "one node, a plain Slurm job"),
        (["--set", "cluster.nodes=3"], "3 nodes, a heterogeneous Slurm job"),
        (["--set", "cluster.nodes=3", "cluster.mode=plain"], "3 nodes, a plain Slurm job"),
        (["--set", "cluster.nodes=3", "cluster.mode=local"], "this machine, without Slurm"),
        (["--nodes", "3", "--set", "cluster.mode=local"], "3 nodes, a heterogeneous Slurm job"),
        (["--nodes", "1", "--set", "cluster.mode=het"], "one node, a plain Slurm job"),
        ([], "this machine, without Slurm"),
    ],
)
def test_modes(config, capsys, arguments, words):
    assert plan.main(["c.yaml", *arguments]) == 0
    assert words in capsys.readouterr().out


def test_where_there_is_no_sbatch_a_configuration_for_slurm_runs_here_unless_somebody_insists(config, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(config))
    assert submit.main(["c.yaml", "--dry-run", "--set", "cluster.nodes=3"]) == 0
    said = capsys.readouterr()
    assert "this machine, without Slurm" in said.out
    assert "warning: cluster.nodes = 3: there is no sbatch here, so that the run uses this machine alone" in said.err
    for insists in (["--nodes", "3"], ["--set", "cluster.nodes=3", "cluster.mode=het"]):
        assert submit.main(["c.yaml", *insists]) == 2
        assert "asks for 3 Slurm nodes, but scontrol: no such program on PATH" in capsys.readouterr().err
    assert not (config / "runs").exists()


def test_a_number_of_nodes_leaves_the_mode_to_later_resumes_with_another_one(config, capsys, monkeypatch):
    monkeypatch.setattr(claims, "snapshot_code", lambda *_: None)
    up = "echo 'Slurmctld(primary) at login is UP'"
    nodes = "printf 'main*|n1|8|4000|(null)|infinite\\nmain*|n2|8|4000|(null)|infinite\\nmain*|n3|8|4000|(null)|infinite\\n'"
    gone = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    quiet = {"scontrol": up, "sinfo": nodes, "srun": ":", "squeue": gone, "sacct": "echo 'JobID|State'"}
    stand_in(config, monkeypatch, **quiet, sbatch="echo Submitted batch job 7")
    for mode in ("auto", "het", "local"):
        run = f"runs/{mode}"
        assert submit.main(["c.yaml", "--nodes", "1", "--set", f"run.folder={run}", f"cluster.mode={mode}"]) == 0
        assert "one node, a plain Slurm job" in capsys.readouterr().out
        (config / run / "checkpoints/step_000005").mkdir()
        checkpoint(config / run, 5)
        assert submit.main(["--resume", run, "--nodes", "3", "--dry-run"]) == 0
        assert "3 nodes, a heterogeneous Slurm job" in capsys.readouterr().out
        assert submit.main(["--resume", run, "--dry-run"]) == 0
        assert "one node, a plain Slurm job" in capsys.readouterr().out


def test_keys_may_stand_behind_the_configuration():
    """Wherever options stand; those of --set win."""
    words = ["c.yaml", "run.seed=3", "--nodes", "3", "run.steps=7", "--follow", "--set", "run.seed=4"]
    options = submit._parse(words)
    assert (options.config, options.nodes, options.set) == ("c.yaml", 3, ["run.seed=3", "run.steps=7", "run.seed=4"])
    resumed = submit._parse(["--resume", "runs/a", "run.steps=9", "run.seed=1"])
    assert (resumed.config, resumed.resume, resumed.set) == (None, "runs/a", ["run.steps=9", "run.seed=1"])
