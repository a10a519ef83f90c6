"""Imported by every Python that finds it on its path: any connection to another machine fails."""

import socket
from typing import Any

_connect = socket.socket.connect


def _local_alone(self: socket.socket, address: Any) -> None:
    if self.family != socket.AF_UNIX:
        raise OSError(f"the network is denied: {address}")
    _connect(self, address)


def _nobody(*_: Any, **__: Any) -> Any:
    raise OSError("no network")


socket.socket.connect = _local_alone  # type: ignore[method-assign]
socket.getaddrinfo = _nobody
