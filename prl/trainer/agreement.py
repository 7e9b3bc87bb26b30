"""The trainer's ranks compare what their collectives depend on, before the first one."""

import json
import os

from torch._C._distributed_c10d import Store  # torch.distributed does not export it to type checkers

from prl.control.child import EndsRun, say
from prl.trainer import device
from prl.weights.agreement import Facts, check_agreement, of_process
from prl.weights.transport import libraries

_KEY = "prl/facts of rank 0"


class RanksDiffer(EndsRun):
    """Collectives of these ranks would hang or carry wrong bytes."""


def compare_with_rank_0(store: Store) -> None:
    """Says what this rank's collectives depend on, and waits (as long as the store's timeout) for what rank 0's do. Raises
    RanksDiffer where they do not go together."""
    rank = int(os.environ["RANK"])
    ours = of_process(f"trainer rank {rank}", os.uname().nodename, libraries(device.device()), os.environ)
    say(f"prl: {ours.in_words()}")
    if rank == 0:
        store.set(_KEY, json.dumps(ours.to_json()))
        return
    try:
        harmless = check_agreement(Facts.from_json(json.loads(store.get(_KEY))), ours)
    except ValueError as error:
        raise RanksDiffer(f"the trainer's ranks cannot work together: {error}") from error
    if harmless:
        say(f"prl: differences from rank 0 that do no harm: {harmless}")
