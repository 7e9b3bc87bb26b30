"""`python -m prl.trainer`: one trainer rank, started by the node agent.

Megatron is imported inside `main`: `device.install` has to come before.
"""

import logging
import os
import warnings

from prl.control.child import Child, run_threaded_child
from prl.control.threaded import ThreadedClient


def main(child: Child, client: ThreadedClient) -> None:
    warnings.filterwarnings("ignore", module="megatron")  # about kernels that it does without, on every rank
    logging.getLogger("megatron").setLevel(logging.ERROR)
    from prl.trainer import device

    device.install(child.config.train.threads, yields_cpu="PRL_YIELDS_CPU" in os.environ)
    from prl.trainer.loop import run

    run(child, client)


if __name__ == "__main__":
    run_threaded_child(main)
