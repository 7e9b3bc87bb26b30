"""What is known of an accelerator's memory by its type."""

import pytest

from prl.cluster.options import ClusterOptions
from prl.config.accelerators import accelerator_gib


@pytest.mark.parametrize(
    ("kind", "room_gib"),
    [("h100", 79), ("H200", 139), ("nvidia_l40s", 44), ("tesla-a10", 22), ("mi250x", 63)],
)
def test_known_types(kind, room_gib):
    assert accelerator_gib(ClusterOptions(gpu_type=kind)) == (room_gib, f"cluster.gpu_type = {kind}")
    assert accelerator_gib(ClusterOptions(gpu_type=kind, gpu_memory_gib=12.5)) == (12.5, "cluster.gpu_memory_gib = 12.5")


@pytest.mark.parametrize("kind", [None, "a100", "v100", "h100_1g.10gb", "nvidia_h100_80gb_hbm3_1g.10gb", "gpu", ""])
def test_types_of_several_sizes_and_shares_are_not_known(kind):
    assert accelerator_gib(ClusterOptions(gpu_type=kind)) == (None, "cluster.gpu_memory_gib = null")
