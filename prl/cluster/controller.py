"""What watches over a local job: `python -m prl.cluster.controller FOLDER SUBMITTER`, submitit's controller with an end.

It ends with the process that submitted the job, however that ended (kill -9, say): nobody could end the job any more.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from submitit.local import local

from prl.config.load import load
from prl.control.parent import end_with_parent
from prl.runfolder.paths import RunFolder

LOOK_S = 0.05  # between two looks at the task
KILLED_S = 10.0  # a killed process lives no longer, unless it hangs in its storage


class Controller(local.Controller):  # type: ignore[misc]
    """Hands SIGTERM on to the task, and kills what has not ended control.stop_s later."""

    def __init__(self, folder: Path) -> None:
        self._asked: tuple[int, float] | None = None  # signal and time
        super().__init__(folder)

    def _forward_signal(self, signum: int, *args: Any) -> None:
        self._asked = self._asked or (signum, time.monotonic())
        super()._forward_signal(signum, *args)

    def start_tasks(self) -> None:
        super().start_tasks()
        if self._asked is not None:  # before there was a task that could be told
            super()._forward_signal(self._asked[0])

    def wait(self, freq: int = 24) -> list[int | None]:
        """Exit codes of the tasks. There is no time limit."""
        while self._asked is None and self._go_on():
            time.sleep(LOOK_S)
        if self._asked is not None:
            self._look_until(self._asked[1] + load(RunFolder(os.environ["PRL_RUN"]).config).control.stop_s)
            for task in self.tasks:
                task.kill()  # nothing happens where it has ended
            self._look_until(time.monotonic() + KILLED_S)
            for task in self.tasks:
                if task.poll() is None:
                    print(f"process {task.pid} was killed and has not ended in {KILLED_S:g} s: its storage hangs", flush=True)
        return [task.poll() for task in self.tasks]

    def _look_until(self, end: float) -> None:
        while self._go_on() and time.monotonic() < end:
            time.sleep(LOOK_S)

    def _go_on(self) -> bool:
        return any(task.poll() is None for task in self.tasks)


def main(folder: str, submitter: str) -> None:
    controller = Controller(Path(folder))  # has taken SIGTERM over
    end_with_parent(int(submitter))
    controller.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
