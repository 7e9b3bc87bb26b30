"""Ports to serve on."""

import errno
import random
import socket

# Below the ports that systems give to outgoing connections, one of which could take a port before its server has started.
PORTS = range(20_000, 32_000)
_TRIES = 200


def free_port(host: str) -> int:
    """A port that nothing listens on at `host` now. Raises OSError naming the host when there is none."""
    tried = random.sample(PORTS, min(_TRIES, len(PORTS)))
    for port in tried:
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
                return port
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise OSError(error.errno, f"no free port on {host}: {error.strerror}") from error
    words = f"no free port on {host}: {len(tried)} tried from {PORTS[0]} to {PORTS[-1]} are all in use"
    raise OSError(errno.EADDRINUSE, words)
