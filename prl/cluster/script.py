"""The batch script of a Slurm job, rendered from the templates in slurm/."""

import shlex
import string
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from prl.cluster.fabric import VARIABLES
from prl.cluster.option_names import long_name
from prl.cluster.requests import Request, Value, requests
from prl.cluster.split import Split
from prl.cluster.warning import measured_lead_s
from prl.config.hub import cache_of
from prl.config.schema import Config
from prl.runfolder.paths import RunFolder

# Of srun: mpi is none's, as torch makes its own groups; the agent binds its processes itself.
_STEP_OPTIONS: Mapping[str, Value] = {"mpi": "none", "cpu-bind": "none"}
_ENTRY = ("-u", "-m", "submitit.core._submit")


class _Template(string.Template):
    delimiter = "@@"  # bash has no use for it, so that the templates are shell scripts as they stand


def template_folder() -> Path:
    """slurm/ beside the package in a checkout (or a run's code folder), else where `pip install` puts it."""
    places = (Path(__file__).resolve().parents[2] / "slurm", Path(sys.prefix) / "share" / "prl" / "slurm")
    for place in places:
        if (place / "het.sbatch").is_file():
            return place
    raise FileNotFoundError(f"the sbatch templates are missing: looked in {' and '.join(map(str, places))}; install prl again")


def site_folder() -> Path:
    """Where the site profiles lie that come with prl."""
    return template_folder() / "sites"


def task_environment(config: Config, run: RunFolder, attempt: int) -> dict[str, str]:
    """Variables of every task, in Slurm jobs and on this machine: the fabric's, those of the configuration, which run it
    belongs to, and the run's own copy of the code in front of whatever is installed (or lies in the current folder)."""
    return {
        **VARIABLES[config.cluster.fabric],
        **{name: str(value) for name, value in config.cluster.environment.items()},
        "PYTHONPATH": str(run.code),
        "PYTHONSAFEPATH": "1",
        "PRL_RUN": str(run),
        "PRL_ATTEMPT": str(attempt),
        "PRL_TASK_LOGS": str(submitit_folder(run, attempt)),
    }


def submitit_folder(run: RunFolder, attempt: int) -> Path:
    """Where submitit keeps the pickled call, its results and what the node agents print."""
    return run.attempt(attempt) / "submitit"


def render(config: Config, split: Split, run: RunFolder, attempt: int, *, after: str | None = None) -> str:
    """The script of a het or plain job, whose step runs `task_command` once on every node. `after`: the id of the job before it
    in the chain that begins with the attempt; which one it is itself, it finds out once it starts."""
    cluster = config.cluster
    environment = task_environment(config, run, attempt) | ({} if after is None else {"PRL_ATTEMPT": ""})
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items() if name != "PYTHONPATH"]
    exports.append(f'export PYTHONPATH={shlex.quote(environment["PYTHONPATH"])}"${{PYTHONPATH:+:$PYTHONPATH}}"')
    exports.append("export SUBMITIT_EXECUTOR=slurm")
    asked = [directives(request) for request in _requests(config, split, after)]
    values = {
        "name": shlex.quote(config.run.name),
        # Into a folder that is there: Slurm makes none.
        "batch_log": shlex.quote(str(run.batch_log(attempt) if after is None else run.chain_log(attempt))),
        "warning": f"USR1@{measured_lead_s(cluster, run)}",
        "requeue": "requeue" if cluster.requeue else "no-requeue",
        "setup": "\n".join((*(f"module load {shlex.quote(module)}" for module in cluster.modules), *cluster.setup)),
        "exports": "\n".join(exports),
        "step_options": " ".join(
            _flag(name, value) for name, value in _step_options(config, run).items() if value is not False
        ),
        "begin": shlex.join([*_python(config, run), "-m", "prl.cluster.begin"]),
        "clean_up": shlex.join([*_python(config, run), "-m", "prl.orchestrator.clean_up"]),
        "end": shlex.join([*_python(config, run), "-m", "prl.cluster.end"]),
        "command": task_command(config, run, attempt),
    }
    if split.kind == "het":
        values["train_options"], values["sample_options"] = asked
    else:
        (values["options"],), values["train_nodes"] = asked, str(split.components[0].nodes)
    template = template_folder() / f"{split.kind}.sbatch"
    return _Template(template.read_text()).substitute(values)


def _requests(config: Config, split: Split, after: str | None) -> list[Request]:
    """What the job asks for; of one that follows another, with that for its dependency: however it ended, as another job of the
    run's name may have nothing to do with it, and the leader alone, with which all components end."""
    asked = list(requests(config, split))
    if after is None:
        return asked
    own = [{name: value for name, value in request.options.items() if name != "dependency"} for request in asked]
    own[0]["dependency"] = f"afterany:{after}"
    return [replace(request, options=options) for request, options in zip(asked, own, strict=True)]


def directives(request: Request) -> str:
    """The lines of a batch script that ask for a component."""
    return "\n".join(f"#SBATCH {_flag(name, value)}" for name, value in request.options.items())


def _flag(name: str, value: Value) -> str:
    return f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}"


def _step_options(config: Config, run: RunFolder) -> dict[str, Value]:
    cluster = config.cluster
    options = {**_STEP_OPTIONS, **{long_name(key): value for key, value in cluster.srun.items()}}
    if cluster.container == "pyxis":
        options |= {"container-image": str(cluster.container_image), "container-mounts": ",".join(_mounts(config, run))}
    return options


def task_command(config: Config, run: RunFolder, attempt: int) -> str:
    """What every node runs: submitit's entry, which loads the function pickled for the attempt and stores what becomes of
    it, in a container where there is one."""
    return shlex.join([*_python(config, run), *_ENTRY, str(submitit_folder(run, attempt))])


def _python(config: Config, run: RunFolder) -> list[str]:
    """What begins a command that runs the nodes' Python, in apptainer's container where it is one (pyxis's is srun's own)."""
    cluster, around = config.cluster, list[str]()
    if cluster.container == "apptainer":
        around = ["apptainer", "exec", *cluster.container_arguments]
        if cluster.gpus_per_node and not {"--nv", "--nvccli", "--rocm"} & set(around):
            around.append("--nv")
        around += ["--bind", ",".join(_mounts(config, run)), str(cluster.container_image)]
    return [*around, cluster.python or (sys.executable if cluster.container == "none" else "python3")]


def _mounts(config: Config, run: RunFolder) -> list[str]:
    """Folders that a container sees under the same path as outside, and those that the configuration names."""
    own = dict.fromkeys(filter(None, (str(run), cache_of(config.model.path), config.run.replay)))
    named = (mount if ":" in mount else f"{mount}:{mount}" for mount in config.cluster.container_mounts)
    return [*(f"{folder}:{folder}" for folder in own), *named]
