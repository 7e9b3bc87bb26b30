"""The names of sbatch's and srun's options: for each a list of those that releases from 21.08 to 25.05 have, as their help
leaves some out (srun's --network, say), and what the site's own program says, which also has those of its plugins
(--container-image, --uenv, ...)."""

import difflib
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Literal

from prl.cluster.run import ProgramError, Runner, run

Program = Literal["sbatch", "srun"]

_OPTION = re.compile(r"^ {2,}(?:-\w,? +)?--([a-z][a-z0-9-]*)", re.MULTILINE)


def long_name(key: str) -> str:
    """The name under which an option stands in the lists, of a key of the configuration: --cpu_bind is cpu-bind."""
    return key.lstrip("-").replace("_", "-")


def listed(program: Program) -> dict[str, str]:
    """The letter of each listed option by its long name; empty where it has none."""
    rows = (Path(__file__).parent / f"{program}_options.txt").read_text().splitlines()
    return {name: letter for name, _, letter in (row.partition(" ") for row in rows)}


def parse_help(text: str) -> frozenset[str]:
    """Long names in what `sbatch --help` or `srun --help` prints."""
    return frozenset(_OPTION.findall(text))


def unknown_names(program: Program, names: AbstractSet[str], runner: Runner = run) -> dict[str, str]:
    """For each name that is no option of the program, what to do. The site's own one is asked only about names that are not
    listed; where there is none, the list counts alone."""
    letters = listed(program)
    unlisted = names - letters.keys()
    if not unlisted:
        return {}
    said, why = _asked(program, runner)
    known = letters.keys() | said
    return {
        name: f"{program} has no such option; {_suggestion(program, name, letters, known)}{why}" for name in unlisted - known
    }


def _asked(program: Program, runner: Runner) -> tuple[frozenset[str], str]:
    """The names that the site's own program says, and why it says none. What it complains of itself (that it finds no
    configuration, say) has nothing to do with the name in question and is left out."""
    try:
        answer = runner([program, "--help"], timeout_s=15.0, check=False)
    except ProgramError as error:
        why = str(error)
    else:
        if answer.code == 0:
            return parse_help(answer.out), ""
        why = f"{program} --help ends with exit code {answer.code} here"
    return frozenset(), f" (an option of this site's alone would need its {program}, but {why})"


def _suggestion(program: Program, name: str, letters: Mapping[str, str], known: AbstractSet[str]) -> str:
    short = [option for option, letter in letters.items() if letter == name]
    if short:
        return f"write its long name, {short[0]}"
    near = _nearest(name, known)
    return f"did you mean {near}?" if near else f"{program} --help lists them"


def _nearest(name: str, known: AbstractSet[str]) -> str | None:
    """A name that differs by a letter or two; else the option that `name` says more than, as mem-per-node is mem; else
    whatever is like it."""
    options = sorted(known)
    misspelt = difflib.get_close_matches(name, options, n=1, cutoff=0.85)
    begins = sorted((option for option in options if name.startswith(f"{option}-")), key=len)
    alike = difflib.get_close_matches(name, options, n=1)
    return next(iter([*misspelt, *begins[-1:], *alike]), None)
