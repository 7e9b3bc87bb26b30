"""The files of a model's folder, found out from their first bytes and sizes, without torch: whether they are whole, and where
in them each of the model's tensors lies."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prl.config.hf_config import ModelConfig, UnsupportedModelError
from prl.config.tensors import tensor_shapes

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")  # of files of weights, in all forms
_HEADER_BYTES = 100_000_000  # more is no header for safetensors either
_LFS_POINTER = b"version https://git-lfs"
_DTYPES = ("F64", "F32", "F16", "BF16")  # others are quantized: numbers that mean nothing without their scales
# Weights that some folders hold although they follow from the config or from other weights.
_DERIVED = ("rotary_emb.inv_freq", "lm_head.weight")
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Stored:
    """A tensor of a file."""

    path: Path
    dtype: str  # safetensors' name of it
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where one of a model's tensors lies."""

    path: Path
    name: str  # of the tensor in the file
    expert: int | None  # of a tensor that holds all experts of a layer, it is `rows` of tensor[expert]; None: it is all of it
    rows: slice


def weight_problems(folder: Path, model: ModelConfig | None) -> list[str]:
    """What keeps a trainer from reading the folder's weights, each with its file; of an unknown model, whether they are
    whole."""
    try:
        if model is None:
            _stored(folder)
        else:
            find_weights(folder, model)
    except UnsupportedModelError as error:
        return list(error.args)
    return []


def find_weights(folder: Path, model: ModelConfig) -> dict[str, Place]:
    """The places of all of the model's tensors, in the order of `tensors.tensor_shapes`. Experts may lie each on its own, as
    hubs hold them, or all of a layer in one tensor.

    Raises UnsupportedModelError where files are missing or damaged, where the folder lacks a tensor, has one of another shape,
    one of numbers that are no floating-point ones, or one that the architecture lacks.
    """
    stored = _stored(folder)
    places: dict[str, Place] = {}
    missing, misshapen, quantized = [], [], []
    for name, shape in tensor_shapes(model).items():
        held, expert, rows = _held(stored, name, shape)
        if held not in stored:
            missing.append(name)
            continue
        found = stored[held]
        whole = shape if expert is None else (model.experts, (2 if "gate_up" in held else 1) * shape[0], shape[1])
        if found.shape != whole:
            misshapen.append(f"{held} is {list(found.shape)}, not {list(whole)}")
        if found.dtype not in _DTYPES:
            quantized.append(f"{held} is {found.dtype}")
        places[name] = Place(found.path, held, expert, rows)
    used = {place.name for place in places.values()}
    unknown = [name for name in stored if name not in used and not name.endswith(_DERIVED)]
    wrong = {"missing": missing, "unknown": unknown, "of another shape": misshapen, "of no floating-point numbers": quantized}
    problems = [f"{len(names)} tensors {what}, e.g. {', '.join(names[:3])}" for what, names in wrong.items() if names]
    if problems:
        raise UnsupportedModelError(
            f"its weights are not those of the {model.architecture} model in config.json: {'; '.join(problems)}"
        )
    return places


def files_read(folder: Path, *, weights: bool) -> list[Path]:
    """The files of the folder itself that a run reads: config, tokenizer and the like, and those of its weights where they are
    wanted. Raises OSError, and UnsupportedModelError where it has no weights that a trainer reads."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix not in WEIGHT_SUFFIXES]
    return files + (sorted(_named(folder)) if weights else [])


def tokenizer_problems(folder: Path) -> Iterator[str]:
    """What keeps actors from reading the folder's tokenizer and settings, each with its file."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        yield "has no tokenizer.json; it must be a complete Hugging Face folder"
    else:
        try:
            Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing narrower
            yield f"tokenizer.json is no tokenizer ({error}){_again(path)}"
    for path in (folder / "tokenizer_config.json", folder / "generation_config.json"):
        try:
            if path.is_file() and not isinstance(json.loads(path.read_bytes()), dict):
                yield f"{path.name} holds no keys and values{_again(path)}"
        except (OSError, ValueError, RecursionError) as error:
            yield f"{path.name} cannot be read ({error}){_again(path)}"


def _stored(folder: Path) -> dict[str, Stored]:
    """All tensors of the folder. Raises UnsupportedModelError with what is wrong with each file."""
    named = _named(folder)
    found: dict[str, Stored] = {}
    problems = []
    for path, wanted in sorted(named.items()):
        try:
            held = _tensors(path)
        except FileNotFoundError:
            problems.append(f"has no file {path.name}, which its {INDEX} names; download the folder's missing files")
        except _UNREADABLE as error:
            problems.append(f"{path.name} is damaged ({error}){_again(path)}")
        else:
            missing = sorted((wanted or set()) - held.keys())
            if missing:
                problems.append(
                    f"{path.name} lacks {len(missing)} tensors that {INDEX} places there, e.g. {missing[0]}; download it again"
                )
            found |= {name: tensor for name, tensor in held.items() if wanted is None or name in wanted}
    if problems:
        raise UnsupportedModelError(*problems)
    return found


def _named(folder: Path) -> dict[Path, set[str] | None]:
    """The folder's files of weights with the tensors that should lie in each; None: all that do."""
    index, weights = folder / INDEX, folder / WEIGHTS
    if not index.is_file():
        if weights.is_file():
            return {weights: None}
        raise UnsupportedModelError(f"has neither {WEIGHTS} nor {INDEX}; convert its weights, or set model.init: random")
    named: dict[Path, set[str] | None] = {}
    try:
        placed = json.loads(index.read_bytes())["weight_map"]
        for name in set(placed.values()):
            named[folder / name] = {tensor for tensor, file in placed.items() if file == name}
    except _UNREADABLE as error:
        raise UnsupportedModelError(
            f"{INDEX} is no index of weights ({type(error).__name__}: {error}); download it again"
        ) from error
    elsewhere = sorted(str(path) for path in named if path.parent != folder)
    if elsewhere:  # samplers would not find them, nor a node's own copy of the folder have them
        raise UnsupportedModelError(
            f"{INDEX} names {elsewhere[0]}, which does not lie in the folder itself; put all files of weights there, and their "
            f"plain names into the index"
        )
    return named


def _tensors(path: Path) -> dict[str, Stored]:
    """What a safetensors file holds: 8 bytes with the header's length, the header (JSON), the tensors' bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 0 < length <= min(size - 8, _HEADER_BYTES):
            raise ValueError(f"its {size} bytes are no safetensors file, or only the beginning of one")
        header = json.loads(file.read(length))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    whole = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if size != whole:
        raise ValueError(f"it has {size} bytes and should have {whole}")
    return {name: Stored(path, entry["dtype"], tuple(entry["shape"])) for name, entry in tensors.items()}


def _held(stored: Mapping[str, Stored], name: str, shape: tuple[int, ...]) -> tuple[str, int | None, slice]:
    """The name under which a folder has a tensor, and what of it where it is in one with other experts'."""
    match = None if name in stored else _EXPERT.fullmatch(name)
    if match is None:
        return name, None, slice(0, shape[0])
    layer, expert, matrix = match.groups()
    first = shape[0] if matrix == "up" else 0  # gates come first
    return f"{layer}.{'down' if matrix == 'down' else 'gate_up'}_proj", int(expert), slice(first, first + shape[0])


def _again(path: Path) -> str:
    try:
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                return ": it is git-lfs's pointer to the file; fetch the file itself with git lfs pull"
    except OSError:
        pass  # is said already
    return "; download it again"
