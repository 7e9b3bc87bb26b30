"""The processes of a run, by what they are."""

import psutil

from prl.runfolder.paths import RunFolder


def children_of(pid: int, folder: RunFolder) -> dict[str, psutil.Process]:
    """The run's child processes by their role and index."""
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        try:
            environment = process.environ()
            line = process.cmdline()
        except psutil.NoSuchProcess:
            continue  # has ended meanwhile
        role, index = environment.get("PRL_ROLE"), environment.get("PRL_INDEX")
        if environment.get("PRL_RUN") == str(folder) and role and index and line[1:2] == ["-m"]:
            found.setdefault(f"{role} {index}", process)
    return found
