"""What all commands do with a command line: an option that there is not is refused with the nearest one."""

import argparse
import difflib
import sys
from collections.abc import Mapping, Sequence

from prl.cli import console
from prl.cluster.option_names import listed
from prl.cluster.requests import key_of

BAD_USAGE = 2


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None, *, sbatch: bool = False) -> argparse.Namespace:
    """With options before, between and behind the other arguments. `sbatch`: the command has keys for sbatch's options, which
    are known, too. Exits with the code 2 where something cannot be read."""
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        own = set(parser._option_string_actions)
        of_sbatch = listed("sbatch") if sbatch else {}
        named = [word for word in unknown if word.startswith("-") and word != "--"]
        problems = [_refusal(word, own, of_sbatch) for word in named]
        console.refuse(parser.prog, *(problems or [f"nothing is known to do with {' '.join(unknown)}; {parser.prog} --help"]))
        sys.exit(BAD_USAGE)
    return options


def _refusal(word: str, own: set[str], of_sbatch: Mapping[str, str]) -> str:
    """`of_sbatch`: letters by long names."""
    option, _, value = word.partition("=")
    by_letter = (f"--{name}" for name, letter in of_sbatch.items() if letter == option[1:2])
    long = option if option.startswith("--") else next(by_letter, option)
    theirs = {f"--{name}" for name in of_sbatch} - own
    if long in own:
        return f"there is no option {option}; write its long name, {long}"
    if long in theirs:
        return f"{option} is sbatch's and no option here; {key_of(long[2:], value)}"
    near = difflib.get_close_matches(long, sorted(own | theirs), n=1)
    if not near:
        return f"there is no option {option}; --help lists those that there are"
    of_whom = f"sbatch's {near[0]}? Then {key_of(near[0][2:], value)}" if near[0] in theirs else f"{near[0]}?"
    return f"there is no option {option}; did you mean {of_whom}"
