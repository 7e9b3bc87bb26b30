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
        if _is_free(host, port):
            return port
    words = f"no free port on {host}: {len(tried)} tried from {PORTS[0]} to {PORTS[-1]} are all in use"
    raise OSError(errno.EADDRINUSE, words)


def count_free_ports(host: str, tries: int = 600) -> int:
    """How many of PORTS nothing listens on at `host`, estimated from so many of them: trying all takes a tenth of a second.
    Raises OSError naming the host where it has no such address."""
    tried = random.sample(PORTS, min(tries, len(PORTS)))
    return round(sum(_is_free(host, port) for port in tried) * len(PORTS) / len(tried))


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise OSError(error.errno, f"no free port on {host}: {error.strerror}") from error
    return True
