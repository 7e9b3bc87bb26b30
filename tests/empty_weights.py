"""Files of weights as large as a model's, but of zeros, which take no space."""

import json
import math

from prl.config.tensors import tensor_shapes

BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1}


def write_tensors(path, tensors):
    """A safetensors file of {name: (dtype as there, shape)}."""
    entries, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = BYTES[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)


def write_model(path, model):
    """All tensors of a ModelConfig."""
    write_tensors(path, {name: ("BF16", shape) for name, shape in tensor_shapes(model).items()})
