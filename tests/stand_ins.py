"""Programs in place of Slurm's: for answers that no cluster here gives, as those of other releases and of faults."""


def stand_in(folder, monkeypatch, **lines):
    """Put programs of a few shell lines in front of PATH; gives the file that says how they were called, a call a line."""
    calls, programs = folder / "calls.txt", folder / "stand_ins"
    if not programs.exists():
        programs.mkdir()
        monkeypatch.setenv("PATH", str(programs), prepend=":")
    for name, line in lines.items():
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{calls}\n{line}\n')
        (programs / name).chmod(0o755)
    return calls
