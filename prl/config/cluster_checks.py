"""Checks of what goes into a batch script."""

import re
from collections.abc import Iterator

from prl.config.schema import Config


def sbatch_problems(config: Config) -> Iterator[str]:
    """Every value becomes one line of a batch script."""
    cluster = config.cluster
    named = {f"cluster.{key}": getattr(cluster, key) for key in ("partition", "account", "qos", "interface")}
    named |= {f"cluster.sbatch.{key}": f"{key}={value}" for key, value in cluster.sbatch.items()}
    for key, value in named.items():
        if value is not None and not value.isprintable():
            yield f"{key!r} = {value!r}: give one line without control characters"
    for key in cluster.sbatch:
        if not re.fullmatch("(--)?[A-Za-z][A-Za-z0-9_-]*", key):
            yield f"cluster.sbatch.{key}: is no option of sbatch; give the name of one, e.g. constraint"
    for number, line in enumerate(cluster.setup):
        if "\0" in line:
            yield f"cluster.setup[{number}] = {line!r}: give a line without NUL"
