"""What the ranks have written of a checkpoint, by its own index."""

from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from prl.config.hf_config import ModelConfig


def bytes_of_tensors(checkpoint: Path, ranks: int, prefix: str = "") -> list[int]:
    """By each rank, of the tensors whose names begin so."""
    metadata, found = FileSystemReader(checkpoint).read_metadata(), [0] * ranks
    for index, place in metadata.storage_data.items():
        saved = metadata.state_dict_metadata[index.fqn]
        if isinstance(saved, TensorStorageMetadata) and index.fqn.startswith(prefix):
            (chunk,) = (chunk for chunk in saved.chunks if chunk.offsets == index.offset)
            found[int(place.relative_path.split("_")[2])] += chunk.sizes.numel() * saved.properties.dtype.itemsize
    return found


def largest_state(model: ModelConfig) -> int:
    """Bytes of a shared optimizer's state of a tiny model's largest tensor, a layer's queries, keys and values."""
    return 12 * (model.heads + 2 * model.kv_heads) * model.head_dim * model.hidden_size
