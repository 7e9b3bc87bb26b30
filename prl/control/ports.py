"""Ports to serve on."""

import socket


def free_port(host: str) -> int:
    """A port that nothing listens on at `host` now. Raises OSError naming the host when there is none."""
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise OSError(error.errno, f"no free port on {host}: {error.strerror}") from error
        port: int = probe.getsockname()[1]
        return port
