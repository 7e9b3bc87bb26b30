"""The names of sbatch's options: a list of those that releases from 21.08 to 25.05 have, and what the site's own sbatch says,
which also has those of its plugins (--container-image, --uenv, ...)."""

import difflib
import re
from collections.abc import Set as AbstractSet
from pathlib import Path

from prl.cluster.run import ProgramError, Runner, run

_ROWS = [line.split() for line in (Path(__file__).parent / "sbatch_options.txt").read_text().splitlines()]  # name and letter
LISTED = frozenset(row[0] for row in _ROWS)
SHORT = {row[1]: row[0] for row in _ROWS if len(row) > 1}

_OPTION = re.compile(r"^ {2,}(?:-\w,? +)?--([a-z][a-z0-9-]*)", re.MULTILINE)


def parse_help(text: str) -> frozenset[str]:
    """Long names in what `sbatch --help` prints."""
    return frozenset(_OPTION.findall(text))


def unknown_names(names: AbstractSet[str], runner: Runner = run) -> dict[str, str]:
    """For each name that is no option of sbatch, what to do. The site's sbatch is asked only about names that are not listed;
    where there is none, the list counts alone."""
    unlisted = names - LISTED
    if not unlisted:
        return {}
    try:
        known, why = LISTED | parse_help(runner(["sbatch", "--help"], timeout_s=15.0).out), ""
    except ProgramError as error:
        known, why = LISTED, f" (an option of this site's alone would need its sbatch, but {error})"
    return {name: f"sbatch has no such option; {_suggestion(name, known)}{why}" for name in unlisted - known}


def _suggestion(name: str, known: AbstractSet[str]) -> str:
    if name in SHORT:
        return f"write its long name, {SHORT[name]}"
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else "sbatch --help lists them"
