#!/usr/bin/env python
"""Writes prl/config/engine_args.txt: the long names of the arguments that the installed vLLM's server takes, one a line, so
that a login node, where vLLM is not installed, can check sample.engine_args. To be run after vLLM is changed.

    python tools/engine_args.py
"""

from pathlib import Path

from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

TARGET = Path(__file__).parents[1] / "prl" / "config" / "engine_args.txt"


def main() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    names = {option[2:] for action in parser._actions for option in action.option_strings if option.startswith("--")}
    TARGET.write_text("".join(f"{name}\n" for name in sorted(names)))
    print(f"{len(names)} names in {TARGET}")


if __name__ == "__main__":
    main()
