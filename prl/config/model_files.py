"""Whether the files of a model's folder are whole: found out from their first bytes and sizes, without torch."""

import json
from collections.abc import Iterator
from pathlib import Path

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_HEADER_BYTES = 100_000_000  # more is no header for safetensors either
_LFS_POINTER = b"version https://git-lfs"


def weight_problems(folder: Path) -> Iterator[str]:
    """What keeps a trainer from reading the folder's weights, each with its file."""
    index, weights = folder / INDEX, folder / WEIGHTS
    if not index.is_file():
        if weights.is_file():
            yield from _told(weights, None)
        else:
            yield f"has neither {WEIGHTS} nor {INDEX}; convert its weights, or set model.init: random"
        return
    files: dict[str, set[str]] = {}  # tensors of each
    try:
        for tensor, name in json.loads(index.read_bytes())["weight_map"].items():
            files.setdefault(str(name), set()).add(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        yield f"{INDEX} is no index of weights ({type(error).__name__}: {error}); download it again"
        return
    for name in sorted(files):
        yield from _told(folder / name, files[name])


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


def _told(path: Path, tensors: set[str] | None) -> Iterator[str]:
    """What is wrong with a file of weights, which should hold these tensors."""
    if not path.is_file():
        yield f"has no file {path.name}, which its {INDEX} names; download the folder's missing files"
        return
    try:
        held = _tensors(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        yield f"{path.name} is damaged ({error}){_again(path)}"
    else:
        missing = sorted((tensors or set()) - held)
        if missing:
            yield f"{path.name} lacks {len(missing)} tensors that {INDEX} places there, e.g. {missing[0]}; download it again"


def _tensors(path: Path) -> set[str]:
    """The names in a safetensors file: 8 bytes with the header's length, the header (JSON), the tensors' bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 0 < length <= min(size - 8, _HEADER_BYTES):
            raise ValueError(f"its {size} bytes are no safetensors file, or only the beginning of one")
        header = json.loads(file.read(length))
    tensors = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    whole = 8 + length + max((end for _, end in tensors.values()), default=0)
    if size != whole:
        raise ValueError(f"it has {size} bytes and should have {whole}")
    return set(tensors)


def _again(path: Path) -> str:
    try:
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                return ": it is git-lfs's pointer to the file; fetch the file itself with git lfs pull"
    except OSError:
        pass  # is said already
    return "; download it again"
