"""The batch script of a Slurm job, rendered from the templates in slurm/."""

import shlex
import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from prl.cluster.split import Component, Split
from prl.config.load import ConfigError
from prl.config.schema import Config
from prl.runfolder.paths import RunFolder

# What the templates and the split decide themselves.
_OWN_OPTIONS = (
    "nodes", "ntasks", "ntasks-per-node", "array", "output", "error", "open-mode", "job-name", "wrap", "parsable"
)  # fmt: skip
_NAMED_OPTIONS = {
    "time": "cluster.time_min",
    "partition": "cluster.partition",
    "account": "cluster.account",
    "qos": "cluster.qos",
    "cpus-per-task": "cluster.cpus_per_node",
    "mem": "cluster.memory_per_node_gib",
    "gpus-per-node": "cluster.gpus_per_node",
    "signal": "cluster.warning_s",
    "requeue": "cluster.requeue",
    "no-requeue": "cluster.requeue",
}


class _Template(string.Template):
    delimiter = "@@"  # bash has no use for it, so that the templates are shell scripts as they stand


def template_folder() -> Path:
    """slurm/ beside the package in a checkout (or a run's code folder), else where `pip install` puts it."""
    places = (Path(__file__).resolve().parents[2] / "slurm", Path(sys.prefix) / "share" / "prl" / "slurm")
    for place in places:
        if (place / "het.sbatch").is_file():
            return place
    raise FileNotFoundError(f"the sbatch templates are missing: looked in {' and '.join(map(str, places))}; install prl again")


def task_environment(run: RunFolder, attempt: int) -> dict[str, str]:
    """Variables of every task, in Slurm jobs and on this machine: which run it belongs to, and the run's own copy of the
    code in front of whatever is installed (or lies in the current folder)."""
    return {
        "PYTHONPATH": str(run.code),
        "PYTHONSAFEPATH": "1",
        "PRL_RUN": str(run),
        "PRL_ATTEMPT": str(attempt),
        "PRL_TASK_LOGS": str(submitit_folder(run, attempt)),
    }


def submitit_folder(run: RunFolder, attempt: int) -> Path:
    """Where submitit keeps the pickled call, its results and what the node agents print."""
    return run.attempt(attempt) / "submitit"


def render(config: Config, split: Split, environment: Mapping[str, str], command: str, batch_log: Path, lead_s: int) -> str:
    """The script of a het or plain job. `command` is a shell command that every node runs once; `batch_log` is where the
    batch script itself writes (Slurm makes no folders); `lead_s` how long before its time limit the job is warned. Raises
    ConfigError for sbatch options that prl sets itself."""
    options = [_options(config, component) for component in split.components]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items() if name != "PYTHONPATH"]
    exports.append(f'export PYTHONPATH={shlex.quote(environment["PYTHONPATH"])}"${{PYTHONPATH:+:$PYTHONPATH}}"')
    exports.append("export SUBMITIT_EXECUTOR=slurm")
    values = {
        "name": shlex.quote(config.run.name),
        "batch_log": shlex.quote(str(batch_log)),
        "warning": f"USR1@{lead_s}",
        "requeue": "requeue" if config.cluster.requeue else "no-requeue",
        "setup": "\n".join(config.cluster.setup),
        "exports": "\n".join(exports),
        "command": command,
    }
    if split.kind == "het":
        values["train_options"], values["sample_options"] = options
    else:
        (values["options"],) = options
    template = template_folder() / f"{split.kind}.sbatch"
    return _Template(template.read_text()).substitute(values)


def _options(config: Config, component: Component) -> str:
    cluster = config.cluster
    options: dict[str, str | int | float | bool] = {"nodes": component.nodes, "ntasks-per-node": 1, "time": cluster.time_min}
    if cluster.partition:
        options["partition"] = cluster.partition
    if cluster.account:
        options["account"] = cluster.account
    if cluster.qos:
        options["qos"] = cluster.qos
    if cluster.cpus_per_node:
        options["cpus-per-task"] = cluster.cpus_per_node
    if cluster.memory_per_node_gib:
        options["mem"] = f"{int(cluster.memory_per_node_gib * 1024)}M"
    if cluster.gpus_per_node:
        options["gpus-per-node"] = cluster.gpus_per_node
    for key, value in cluster.sbatch.items():
        name = key.removeprefix("--").replace("_", "-")
        if name in _NAMED_OPTIONS:
            raise ConfigError(f"cluster.sbatch.{key}: has a key of its own, {_NAMED_OPTIONS[name]}")
        if name in _OWN_OPTIONS:
            raise ConfigError(f"cluster.sbatch.{key}: is set by prl-submit and cannot be changed")
        options[name] = value
    return "\n".join(_flag(name, value) for name, value in options.items() if value is not False)


def _flag(name: str, value: str | int | float | bool) -> str:
    return f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={shlex.quote(str(value))}"


def task_command(folder: Path, python: str = sys.executable) -> str:
    """What every node runs: submitit's entry, which loads the function pickled in `folder` and stores what becomes of it."""
    arguments: Sequence[str] = (python, "-u", "-m", "submitit.core._submit", str(folder))
    return shlex.join(arguments)
