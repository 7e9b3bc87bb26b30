"""Environment variables that bind NCCL to a kind of network."""

from collections.abc import Mapping

# NCCL_NET names the transport that NCCL has to use: without it, NCCL quietly takes sockets where the fast one is missing
# (docs.nvidia.com/deeplearning/nccl/user-guide, environment variables). Libfabric's come through the plugin aws-ofi-nccl, whose
# transport is called so. The values for Slingshot are those that CSCS and OLCF give their users (docs.cscs.ch, NCCL;
# docs.olcf.ornl.gov, PyTorch on Frontier) where both agree.
VARIABLES: Mapping[str, Mapping[str, str]] = {
    "unset": {},
    "ib": {"NCCL_NET": "IB"},
    "efa": {"NCCL_NET": "AWS Libfabric", "FI_PROVIDER": "efa"},
    "slingshot": {
        "NCCL_NET": "AWS Libfabric",
        "NCCL_NET_GDR_LEVEL": "PHB",
        "NCCL_CROSS_NIC": "1",
        "FI_PROVIDER": "cxi",
        "FI_CXI_DEFAULT_CQ_SIZE": "131072",
        "FI_CXI_DISABLE_HOST_REGISTER": "1",
        "FI_CXI_RDZV_PROTO": "alt_read",
    },
    "ethernet": {"NCCL_NET": "Socket"},
}
