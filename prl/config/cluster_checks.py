"""Checks of what goes into a batch script."""

import re
from collections.abc import Iterator

from prl.config.schema import Config

_OWN_VARIABLES = ("PYTHONPATH", "PYTHONSAFEPATH", "SUBMITIT_EXECUTOR", "MASTER_ADDR")


def cluster_problems(config: Config) -> Iterator[str]:
    """Every value becomes one line of a batch script, or a word of one."""
    cluster = config.cluster
    texts = ("partition", "account", "qos", "interface", "gpu_type", "python", "container_image", "local_folder")
    named: dict[str, object] = {key: getattr(cluster, key) for key in texts}
    for section in ("sbatch", "sbatch_train", "sbatch_sample", "srun", "environment"):
        named |= {f"{section}.{key}": f"{key}={value}" for key, value in getattr(cluster, section).items()}
    for section in ("modules", "container_mounts", "container_arguments"):
        named |= {f"{section}[{number}]": value for number, value in enumerate(getattr(cluster, section))}
    for key, value in named.items():
        if value is not None and not str(value).isprintable():
            yield f"{f'cluster.{key}'!r} = {value!r}: give one line without control characters"
    for number, line in enumerate(cluster.setup):
        if "\0" in line:
            yield f"cluster.setup[{number}] = {line!r}: give a line without NUL"
    if cluster.local_folder is not None and not cluster.local_folder.startswith(("/", "~", "$")):
        yield f"cluster.local_folder = {cluster.local_folder}: give an absolute path on the nodes, e.g. /local/$USER"
    for key in cluster.environment:
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", key) or key in _OWN_VARIABLES or key.startswith("PRL_"):
            yield f"cluster.environment.{key}: is no name of a variable, or of one that prl sets itself; choose another"
    if cluster.chain > 1 and cluster.nodes is None:
        yield f"cluster.chain = {cluster.chain}: is for Slurm jobs; ask for nodes with --nodes N, or set it to 1"
    if cluster.chain > 1 and cluster.requeue:
        yield (
            f"cluster.chain = {cluster.chain}: with cluster.requeue = true one job goes on by itself; set this to 1 or that to "
            f"false"
        )
    yield from _container(config)


def _container(config: Config) -> Iterator[str]:
    cluster = config.cluster
    if cluster.container == "none":
        if cluster.container_image is not None:
            yield f"cluster.container_image = {cluster.container_image}: set cluster.container to pyxis or apptainer, too"
        return
    if not cluster.container_image:
        image = "null" if cluster.container_image is None else "''"
        yield f"cluster.container_image = {image}: cluster.container = {cluster.container} needs an image"
    for number, mount in enumerate(cluster.container_mounts):
        if not mount.split(":")[:2][-1].startswith("/"):
            yield (
                f"cluster.container_mounts[{number}] = {mount}: the container sees folders under absolute paths; write /FOLDER "
                f"or FROM:/TO[:ro], with variables and ~ written out"
            )
    if cluster.container == "pyxis" and cluster.container_arguments:
        yield "cluster.container_arguments: are apptainer's; for pyxis put srun's options into cluster.srun"
    if cluster.nodes is None:
        yield f"cluster.container = {cluster.container}: is for Slurm jobs; start prl-submit in a container, or set it to none"
