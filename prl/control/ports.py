"""Ports to serve on."""

import errno
import random
import socket

# Below the ports that systems give to outgoing connections, one of which could take a port before its server has started.
_FIRST, _LAST = 20_000, 32_000
_TRIES = 200


def free_port(host: str) -> int:
    """A port that nothing listens on at `host` now. Raises OSError naming the host when there is none."""
    for port in random.sample(range(_FIRST, _LAST), _TRIES):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
                return port
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise OSError(error.errno, f"no free port on {host}: {error.strerror}") from error
    raise OSError(errno.EADDRINUSE, f"no free port on {host}: {_TRIES} between {_FIRST} and {_LAST} are in use")
