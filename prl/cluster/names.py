"""Names that Slurm cannot have. sbatch itself says no more of one with a blank than that it is invalid, and passes over one
that is empty: `a,,b` is two partitions to it, and `,` the default one."""

import re

_BETWEEN = {  # the names that an option takes; None: it takes one
    "partition": ",",
    "account": None,
    "qos": ",",
    "reservation": ",",
    "constraint": "[,&|]",
}
_AROUND = re.compile(r"[()\[\]]|\*\d+")  # of constraints: groups, and how many nodes are to have a feature


def name_trouble(option: str, value: object) -> str | None:
    """What is wrong with the names that an option of sbatch, by its long name, is given; None where nothing is, or where it
    takes no names."""
    if option not in _BETWEEN or not isinstance(value, str) or not value:
        return None
    if re.search(r"\s", value):
        return "holds a blank, which no name in Slurm does; leave it out"
    between = _BETWEEN[option]
    if between is None:
        return "one name is wanted, found a comma" if "," in value else None
    named = _AROUND.sub("", value) if option == "constraint" else value
    empty = "" in re.split(between, named)
    return (
        f"{'a comma' if between == ',' else 'an operator'} too many, as one of its names is empty; take it out"
        if empty
        else None
    )
