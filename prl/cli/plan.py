"""prl-plan CONFIG: print how a run would be divided over nodes and devices.

prl-plan configs/qwen7b.yaml --nodes 16
"""

import argparse
import sys
from collections.abc import Sequence

from prl.cli import console
from prl.cli.cluster_arguments import add_cluster_arguments, with_cluster_arguments
from prl.cli.command_line import parse
from prl.cluster.script import site_folder
from prl.cluster.split import make_split
from prl.config.checks import check_numbers
from prl.config.load import ConfigError, load
from prl.config.model_checks import model_of, shape_problems
from prl.config.paths import current_folder, resolve_paths


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="prl-plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="YAML file")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="keys to override, as with --set")
    parser.add_argument(
        "--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help="override keys, e.g. cluster.train_nodes=2"
    )
    add_cluster_arguments(parser)
    console.prepare()
    options = parse(parser, arguments, sbatch=True)
    try:
        folder = current_folder()
        config = load(options.config, [*options.keys, *options.set], site_folder())
        config = resolve_paths(with_cluster_arguments(config, options), folder)
        check_numbers(config)
        split = make_split(config)
        problems = shape_problems(config, model_of(config))
        if problems:
            raise ConfigError(*problems)
        print(split.describe(), flush=True)
    except BrokenPipeError:  # the reader has read enough
        return 0
    except ConfigError as error:
        console.refuse("prl-plan", *error.args)
        return 2
    except OSError as error:
        console.refuse("prl-plan", console.in_words(error))
        return 1
    finally:
        console.silence_broken()
    return 0


if __name__ == "__main__":
    sys.exit(main())
