"""A 64-bit digest of named tensors: what a version of the weights is known by.

The digest is the sum, modulo 2**64, of coefficient(name, dtype, index) * (bits + 1) over all elements of all tensors; `bits`
are an element's bits read as a signed integer. So the digests of the parts of any split add up, a swap of two tensors or of
two elements is seen, and a missing tensor of zeros too. Coefficients are odd, from a fixed table of one block of indices
times a factor that depends on the tensor and the block: one multiplication and one addition an element.
It detects faults, not attacks.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from math import gcd

import torch

MODULUS = 2**64
BLOCK = 2**14  # indices that share a factor
_CHUNK_BLOCKS = 16  # blocks worked on at once: 2 MiB of temporaries, which stay in the cache
_GOLDEN = 0x9E3779B97F4A7C15
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensors: Mapping[str, torch.Tensor]) -> int:
    """The digest of whole tensors by their names, in [0, 2**64); their order does not matter."""
    return total(part(name, tensor) for name, tensor in tensors.items())


def total(parts: Iterable[torch.Tensor]) -> int:
    """Add up what `part` and `rectangle` gave."""
    values = list(parts)
    if not values:
        return 0
    return int(torch.stack(values).sum().item()) % MODULUS


def workspace(device: torch.device | str) -> torch.Tensor:
    """Memory for `part` and `rectangle` to work in, 4 MiB; for one thread at a time. Without it each takes its own, and where
    other memory is taken and kept in between the allocator finds room for less and less of that where the last one was."""
    return torch.empty(2 * _CHUNK_BLOCKS * BLOCK, dtype=torch.int64, device=device)


def part(name: str, tensor: torch.Tensor, offset: int = 0, work: torch.Tensor | None = None) -> torch.Tensor:
    """What a contiguous run of a tensor's elements adds to the digest: those from flat index `offset` of the whole tensor
    `name` on. A scalar int64 tensor on the tensor's device (wrapped modulo 2**64). `work`: a `workspace`."""
    flat = _bits(name, tensor.reshape(-1))
    table, sums = _table(tensor.device)
    key = _key(name, tensor.dtype)
    count = flat.numel()
    first = min(-offset % BLOCK, count)  # whole blocks begin there
    blocks = (count - first) // BLOCK
    last = first + blocks * BLOCK
    result = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start, end in ((0, first), (last, count)):
        if start < end:
            block, within = divmod(offset + start, BLOCK)
            until = within + end - start
            inner = (flat[start:end] * table[within:until]).sum() + (sums[until] - sums[within])
            result += inner * _factor(key, block)
    if blocks:
        inner = _block_sums(flat[first:last].view(blocks, BLOCK), table, work) + sums[BLOCK]
        begin = (offset + first) // BLOCK
        result += (inner * _factors(key, torch.arange(begin, begin + blocks, device=tensor.device))).sum()
    return result


def _block_sums(bits: torch.Tensor, table: torch.Tensor, work: torch.Tensor | None) -> torch.Tensor:
    """Of each row the sum of coefficient * bits. In few calls: another thread that computes has to wait between them."""
    sums = torch.empty(len(bits), dtype=torch.int64, device=bits.device)
    memory = _memory(work, min(len(bits), _CHUNK_BLOCKS) * BLOCK, bits.device).view(-1, BLOCK)
    for start in range(0, len(bits), _CHUNK_BLOCKS):
        rows = bits[start : start + _CHUNK_BLOCKS]
        torch.sum(memory[: len(rows)].copy_(rows).mul_(table), 1, out=sums[start : start + len(rows)])
    return sums


def rectangle(
    name: str, tensor: torch.Tensor, row: int, column: int, all_columns: int, work: torch.Tensor | None = None
) -> torch.Tensor:
    """What a rectangle of the matrix `name`, which has `all_columns`, adds to the digest: rows [row, row + tensor.shape[0]) of
    columns [column, column + tensor.shape[1]). In chunks of rows, so that memory stays bounded. `work`: a `workspace`."""
    rows, width = tensor.shape
    if width == all_columns or not tensor.numel():
        return part(name, tensor, row * all_columns, work)
    table, sums = _table(tensor.device)
    key = _key(name, tensor.dtype)
    # Runs of so many elements neither cross a block nor leave a row, wherever they begin: each has one factor.
    run = gcd(column, width, all_columns, BLOCK)
    starts = torch.arange(column, column + width, run, device=tensor.device)
    step = min(rows, max(1, _CHUNK_BLOCKS * BLOCK // width))
    period = BLOCK // gcd(all_columns, BLOCK)  # rows after which the same elements of the table come
    if step > period:
        step -= step % period
    memory = _memory(work, 2 * step * width, tensor.device).view(2, -1, run)
    result = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, rows, step):
        bits = _bits(name, tensor[start : start + step]).view(-1, len(starts), run)
        index = torch.arange(row + start, row + start + len(bits), device=tensor.device)[:, None] * all_columns + starts
        coefficients, values = memory[:, : index.numel()]
        if start == 0 or step % period:
            within = index % BLOCK
            torch.index_select(table.view(-1, run), 0, (within // run).view(-1), out=coefficients)
            ones = sums[within + run] - sums[within]
        inner = values.view(bits.shape).copy_(bits).view(-1, run).mul_(coefficients).sum(1).view(index.shape)
        result += ((inner + ones[: len(bits)]) * _factors(key, index // BLOCK)).sum()
    return result


def slab(name: str, tensor: torch.Tensor, shape: Sequence[int], dim: int, start: int) -> torch.Tensor:
    """What a shard of the tensor `name`, which has `shape` as a whole, adds to the digest: `tensor` holds its elements from
    `start` on along `dim` (0 or 1), and all of the other dimensions, contiguous in their order; in what dimensions of its own
    does not matter."""
    rows = shape[0] if shape else 1
    row_elements = math.prod(shape) // rows if rows else 0
    width = tensor.numel() // rows if rows else 0
    if dim == 1 and width != row_elements:
        return rectangle(name, tensor.reshape(rows, width), 0, start, row_elements)
    return part(name, tensor, start * row_elements if dim == 0 else 0)


def _memory(work: torch.Tensor | None, elements: int, device: torch.device) -> torch.Tensor:
    """Of the workspace, or where that does not do (a row of a rectangle may be longer) anew."""
    if work is None or len(work) < elements:
        return torch.empty(elements, dtype=torch.int64, device=device)
    return work[:elements]


def _bits(name: str, tensor: torch.Tensor) -> torch.Tensor:
    try:
        return tensor.detach().view(_BITS[tensor.element_size()])
    except KeyError:
        raise ValueError(f"tensor {name}: no digest of {tensor.dtype} ({tensor.element_size()} bytes an element)") from None


def _key(name: str, dtype: torch.dtype) -> int:
    return int.from_bytes(blake2b(f"{name}:{dtype}".encode(), digest_size=8).digest(), "little")


def _signed(value: int) -> int:
    value %= MODULUS
    return value - MODULUS if value >= MODULUS // 2 else value


def _factor(key: int, block: int) -> int:
    """splitmix64 of the block in the stream that starts at `key`, made odd; as torch's signed int64."""
    value = (key + (block + 1) * _GOLDEN) % MODULUS
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
    value = (value ^ value >> 27) * 0x94D049BB133111EB % MODULUS
    return _signed((value ^ value >> 31) | 1)


def _factors(key: int, blocks: torch.Tensor) -> torch.Tensor:
    """The same for int64 block numbers; torch shifts arithmetically, hence the masks."""
    value = (blocks + 1) * _signed(_GOLDEN) + _signed(key)
    value = (value ^ (value >> 30) & (2**34 - 1)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> 27) & (2**37 - 1)) * _signed(0x94D049BB133111EB)
    return (value ^ (value >> 31) & (2**33 - 1)) | 1


@lru_cache(maxsize=16)
def _table(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Odd coefficients of one block, and their running sums (BLOCK + 1 of them, the first 0)."""
    table = _factors(0, torch.arange(BLOCK))
    sums = torch.cat([torch.zeros(1, dtype=torch.int64), table.cumsum(0)])
    return table.to(device), sums.to(device)
