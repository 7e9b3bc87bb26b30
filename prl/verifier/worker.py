"""One worker of the pool: reads a check as a line of JSON, answers with a line of JSON.

    {"rule": "math", "gold": "4", "answer": "\\\\boxed{4}"}  ->  {"verdict": "correct"} or {"error": "..."}

The first line that it writes is {"ready": true}. It works in its main thread and ends when its input does; the pool kills it
when a check overruns.
"""

import ctypes
import json
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(memory_mib: int) -> None:
    # A check that never ends would outlive a pool that was killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not end up among the replies

    from prl.verifier import rules

    rules.prepare()
    limit = memory_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))  # 9^9^9 asks for all the memory there is
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"verdict": rules.RULES[request["rule"]](request["gold"], request["answer"])}
        except (MemoryError, RecursionError):
            reply = {"verdict": rules.TIMEOUT}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
