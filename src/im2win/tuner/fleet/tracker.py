"""A client of TVM's RPC tracker, which pairs tuners with free workers by a key."""

from __future__ import annotations

import json
import re
import select
import socket
import struct
from typing import Any

from tvm.rpc.base import RPC_TRACKER_MAGIC, TrackerCode

from im2win.common.json_text import parsed

KEY = "im2win"  # of workers whose owner names none
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MOST_BYTES = 1 << 20
ASK_S = 10.0  # seconds for an answer that does not wait for a worker


class TrackerError(RuntimeError):
    """A tracker that cannot be reached, or that does not answer as one. The message names its address."""


def checked_key(key: str) -> str:
    """The workers' key.

    Raises:
        ValueError: it has other characters than letters, digits, dots, dashes and underscores.
    """
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise ValueError(f"`key` (={key!r}) must be letters, digits, dots, dashes and underscores, a letter or digit first.")
    return key


def address(text: str, name: str = "tracker") -> tuple[str, int]:
    """Host and port of "HOST:PORT"; an IPv6 host stands in brackets.

    Raises:
        ValueError: it is no such text. `name`: of the argument.
    """
    host, _, port = str(text).rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"`{name}` (={text!r}) must be HOST:PORT, such as 127.0.0.1:9190.")
    return host, int(port)


class Tracker:
    """A connection to a tracker. What was registered through it is forgotten when it closes.

    Args:
        where: host and port.

    Raises:
        TrackerError: nothing answers there, or no tracker.
    """

    def __init__(self, where: tuple[str, int]) -> None:
        self.where = where
        try:
            self._sock = socket.create_connection(where, ASK_S)
        except OSError as error:
            raise self._error(f"cannot be reached ({error.strerror or error}); `python -m tvm.exec.rpc_tracker` starts one") from None
        try:
            self._sock.sendall(struct.pack("<i", RPC_TRACKER_MAGIC))
            magic = struct.unpack("<i", self._received(4, ASK_S))[0]
        except (OSError, TrackerError):
            self.close()
            raise self._error("does not answer as TVM's RPC tracker does") from None
        if magic != RPC_TRACKER_MAGIC:
            self.close()
            raise self._error("is no RPC tracker of TVM")

    def _error(self, what: str) -> TrackerError:
        return TrackerError(f"the tracker {self.where[0]}:{self.where[1]} {what}.")

    def close(self) -> None:
        """Ends the connection."""
        self._sock.close()

    def _received(self, count: int, seconds: float) -> bytes:
        self._sock.settimeout(seconds)
        found = b""
        while len(found) < count:
            try:
                part = self._sock.recv(count - len(found))
            except OSError as error:
                raise self._error(f"does not answer ({error})") from None
            if not part:
                raise self._error("closed the connection")
            found += part
        return found

    def _say(self, message: list[Any]) -> None:
        text = json.dumps(message).encode()
        try:
            self._sock.settimeout(ASK_S)
            self._sock.sendall(struct.pack("<i", len(text)) + text)
        except OSError as error:
            raise self._error(f"cannot be written to ({error})") from None

    def _answer(self) -> Any:
        size = struct.unpack("<i", self._received(4, ASK_S))[0]
        if not 0 < size <= _MOST_BYTES:
            raise self._error("gave an answer that is no message")
        try:
            return parsed(self._received(size, ASK_S))
        except ValueError as error:
            raise self._error(f"gave an answer that is no JSON ({error})") from None

    def _ask(self, message: list[Any]) -> Any:
        self._say(message)
        return self._answer()

    def announce(self, key: str, host: str | None, port: int) -> None:
        """Says that a worker is at this port of `host`, or of the address that the tracker sees."""
        if self._ask([TrackerCode.UPDATE_INFO, {"key": f"server:{key}", "addr": [host, port]}]) != TrackerCode.SUCCESS:
            raise self._error("does not take workers")

    def offer(self, key: str, host: str | None, port: int, match_key: str) -> None:
        """Says that this worker is free, for whoever gets the match key."""
        if self._ask([TrackerCode.PUT, key, [port, match_key], host]) != TrackerCode.SUCCESS:
            raise self._error("does not take workers")

    def pending(self, match_key: str) -> bool:
        """Whether a worker's match key was not handed out yet."""
        found = self._ask([TrackerCode.GET_PENDING_MATCHKEYS])
        return isinstance(found, list) and match_key in found

    def models(self, key: str) -> list[str]:
        """The device model of each worker of this key, whether it is free or not."""
        found = self._ask([TrackerCode.SUMMARY])
        try:
            names = [str(one["key"]) for one in found[1]["server_info"]]
        except (TypeError, KeyError, IndexError):
            raise self._error("gave a summary that is none") from None
        return sorted(name.removeprefix(f"server:{key}/") for name in names if name.startswith(f"server:{key}/"))

    def request(self, key: str) -> None:
        """Asks for the next free worker; `granted` waits for it."""
        self._say([TrackerCode.REQUEST, key, "im2win", 1])

    def granted(self, seconds: float) -> tuple[str, int, str] | None:
        """Host, port and match key of the worker that was asked for; None if there was none within so many seconds."""
        if not select.select([self._sock], [], [], seconds)[0]:
            return None
        found = self._answer()
        try:
            code, (host, port, match_key) = found
        except (TypeError, ValueError):
            raise self._error("gave no worker") from None
        if code != TrackerCode.SUCCESS or not (isinstance(host, str) and type(port) is int and isinstance(match_key, str)):
            raise self._error("gave no worker")
        return host, port, match_key
