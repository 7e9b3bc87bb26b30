"""Memory of accelerators, by the types that Slurm calls them by."""

import re

from prl.cluster.options import ClusterOptions

# GiB of one that PyTorch can have, of its smallest kind where there are several (GH200 of 96 and 144 GB); no A100 and V100, of
# which half of the sites' have twice the memory of the others'.
_GIB = {
    "h200": 139.0,
    "h100": 79.0,
    "h800": 79.0,
    "gh200": 95.0,
    "h20": 95.0,
    "b200": 178.0,
    "a40": 44.0,
    "l40s": 44.0,
    "l40": 44.0,
    "a30": 23.0,
    "a10": 22.0,
    "l4": 22.0,
    "mi300x": 191.0,
    "mi250x": 63.0,  # one of its two dies, which are a device each
}
_MAKER = re.compile(r"^(nvidia|tesla|amd|instinct)[_-]")


def accelerator_gib(cluster: ClusterOptions) -> tuple[float | None, str]:
    """Memory of an accelerator in GiB, None where it is not known, and the option and its value that say so. A type of which
    there is more than its bare name (h100_1g.10gb, a share of one) is not known."""
    kind = cluster.gpu_type
    if cluster.gpu_memory_gib is None and kind is not None:
        found = _GIB.get(_MAKER.sub("", kind.lower()))
        if found is not None:
            return found, f"cluster.gpu_type = {kind}"
    room_gib = cluster.gpu_memory_gib
    return room_gib, f"cluster.gpu_memory_gib = {'null' if room_gib is None else f'{room_gib:g}'}"
