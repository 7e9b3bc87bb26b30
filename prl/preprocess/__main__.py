"""Started by the node agent: python -m prl.preprocess."""

from prl.control.child import run_child
from prl.preprocess.loop import preprocess

if __name__ == "__main__":
    run_child(preprocess)
