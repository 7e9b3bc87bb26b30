"""Python's collector of garbage, kept away from what somebody waits for."""

import gc


def leave_what_is_loaded() -> None:
    """For a process that has started. What it has loaded lives as long as it does; a full collection would go through all of it
    again, which takes 30 to 40 ms for the modules of any process of a run alone, and falls into one step in ten or twenty."""
    gc.freeze()
