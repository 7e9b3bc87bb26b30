"""`gpu_check_faults.py FOLDER`: the GPU check at toy size with one fault after another put in. Writes each one's exit code to
FOLDER/codes.json and its report to FOLDER/<fault>.json; the last one ends the process."""

import json
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import gpu_check

# isort: split
import torch

from prl.trainer import batch, model

frequencies, packed, logprobs = model.inverse_frequencies, batch.packed_sequences, gpu_check.token_logprobs


def one_sequence(boundaries, *others):
    return packed(boundaries[[0, -1]], *others)


def half_gradient(*given):
    found, entropies = logprobs(*given)
    return found / 2, entropies


def strike(*unused):
    """The deadline comes in the middle of a measurement."""
    (deadline,) = (thread for thread in threading.enumerate() if isinstance(thread, threading.Timer))
    assert 0 < deadline.interval < 480
    deadline.function(*deadline.args)


MEASURED = mock.Mock(return_value=[{"seconds": 1.0}])
NO_MEMORY = mock.Mock(side_effect=torch.OutOfMemoryError("8 GiB are missing"))
EXACT = {"DTYPES": {"float32": torch.float32}}
FAULTS = {
    "rope": (["parity"], {}, {"inverse_frequencies": lambda config: frequencies(replace(config, rope_theta=9e5))}, {}),
    "packing": (["parity"], {}, {}, {"packed_sequences": one_sequence}),
    "gradient": (["parity"], {"token_logprobs": half_gradient}, {}, {}),
    "error": (["padded", "weights"], {"measure_padded": mock.Mock(side_effect=ValueError("broken"))}, {}, {}),
    "memory": (["padded"], {"measure_padded": NO_MEMORY}, {}, {}),
    "late": (["weights", "--budget-s", "0"], {}, {}, {}),
    "deadline": (["head", "padded", "weights"], {"measure_head": MEASURED, "measure_padded": strike}, {}, {}),
}


def main(folder: Path) -> None:
    codes = {}
    for name, (only, of_check, of_model, of_batch) in FAULTS.items():
        (folder / "codes.json").write_text(json.dumps(codes))
        sys.argv = ["gpu_check.py", "--toy", "--json", str(folder / f"{name}.json"), "--only", *only]
        with ExitStack() as stack:
            for module, changes in ((gpu_check, EXACT | of_check), (model, of_model), (batch, of_batch)):
                for key, value in changes.items():
                    stack.enter_context(mock.patch.object(module, key, value))
            print(f"{name}:", flush=True)
            codes[name] = gpu_check.main()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
