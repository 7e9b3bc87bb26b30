"""Options of the command line that stand for keys of `cluster`, under the names that sbatch's users know."""

import argparse

from prl.cluster.slurm_output import SlurmOutputError, parse_minutes
from prl.config.load import ConfigError, replace
from prl.config.schema import Config


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "where it runs", "in the place of keys of `cluster`; any other option of sbatch: --set cluster.sbatch.NAME=VALUE"
    )
    group.add_argument("--nodes", type=int, metavar="N", help="Slurm nodes in all (null: this machine, without Slurm)")
    group.add_argument("--trainer-nodes", type=int, metavar="T", help="of these, nodes that train (cluster.train_nodes)")
    group.add_argument("--time", metavar="LIMIT", help="time limit: minutes, HH:MM:SS or D-HH:MM:SS (cluster.time_min)")
    group.add_argument("--account", help="Slurm account")
    group.add_argument("--partition", help="Slurm partition")
    group.add_argument("--qos", help="Slurm quality of service")
    group.add_argument(
        "--exclude", metavar="NODES", help="nodes that Slurm is not to give, e.g. n3,n7 (cluster.sbatch.exclude)"
    )
    group.add_argument(
        "--chain",
        type=int,
        metavar="N",
        help="submit N jobs in all: each goes on with the run where the one before it had to leave (cluster.chain)",
    )


def with_cluster_arguments(config: Config, options: argparse.Namespace) -> Config:
    """The configuration with what the command line says. Raises ConfigError."""
    given = {key: getattr(options, key) for key in ("nodes", "account", "partition", "qos", "chain")}
    given["train_nodes"] = options.trainer_nodes
    if options.time is not None:
        try:
            given["time_min"] = parse_minutes(options.time)
        except SlurmOutputError as error:
            raise ConfigError(f"--time: {error}") from None
        if given["time_min"] is None:
            raise ConfigError(f"--time {options.time}: a run needs a time limit; write minutes, or e.g. 1-12:00:00")
    config = replace(config, cluster={key: value for key, value in given.items() if value is not None})
    if options.exclude is not None:
        config = replace(config, cluster={"sbatch": {**config.cluster.sbatch, "exclude": options.exclude}})
    mode = config.cluster.mode
    if options.nodes is not None and (mode == "local" or (mode == "het" and options.nodes == 1)):
        return replace(config, cluster={"mode": "auto"})  # by their number, which a resume may change
    return config
