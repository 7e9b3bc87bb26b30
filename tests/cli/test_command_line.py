"""A command line that cannot be read: each option that there is not is told, with the nearest."""

import pytest

from prl.cli import plan, report, submit

SBATCHS = "is sbatch's and no option here"
SET = "write --set"


@pytest.mark.parametrize(
    ("command", "line", "words"),
    [
        (submit, "c.yaml --partiton x", ["there is no option --partiton; did you mean --partition?"]),
        (submit, "c.yaml --dryrun --nodes 3", ["there is no option --dryrun; did you mean --dry-run?"]),
        (plan, "c.yaml --trainernodes=3", ["there is no option --trainernodes; did you mean --trainer-nodes?"]),
        (report, "run --audti --jsn", ["no option --audti; did you mean --audit?", "no option --jsn; did you mean --json?"]),
        (submit, "c.yaml --constraint=a|b", [f"--constraint {SBATCHS}; {SET} 'cluster.sbatch.constraint=a|b'"]),
        (plan, "c.yaml --constrant a", [f"did you mean sbatch's --constraint? Then {SET} cluster.sbatch.constraint=VALUE"]),
        (submit, "c.yaml --mem=4G", [f"--mem {SBATCHS}; {SET} cluster.memory_per_node_gib=VALUE"]),
        (submit, "c.yaml --array 1-3", [f"--array {SBATCHS}; it is set by prl-submit and cannot be changed"]),
        (submit, "c.yaml -p gpu -C h", ["no option -p; write its long name, --partition", f"-C {SBATCHS}; {SET}"]),
        (report, "run --constraint=a", ["there is no option --constraint; --help lists those that there are"]),
        (report, "run other", ["nothing is known to do with other; prl-report --help"]),
    ],
)  # fmt: skip
def test_an_option_that_there_is_not(config, capsys, command, line, words):
    with pytest.raises(SystemExit, match="2"):
        command.main(line.split())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(words)
    for said, expected in zip(lines, words, strict=True):
        assert said.startswith(f"prl-{command.__name__.rpartition('.')[2]}: error: ")
        assert expected in said


@pytest.mark.parametrize("command", [submit, plan])
@pytest.mark.parametrize("line", ["c.yaml clustr.mode=het", "c.yaml --set clustr.mode=het"])
def test_a_key_that_there_is_not(config, capsys, command, line):
    assert command.main(line.split()) == 2
    assert "--set 'clustr.mode=het': unknown key clustr; did you mean cluster? clustr.mode is" in capsys.readouterr().err


def test_a_plan_takes_keys_behind_the_configuration(config, capsys):
    assert plan.main(["c.yaml", "cluster.nodes=3"]) == 0
    assert "3 nodes, a heterogeneous Slurm job" in capsys.readouterr().out
