"""What tuner and worker say to each other: TVM's greeting with proofs of the secret in it, then frames with checksums.

The greeting is that of TVM's RPC: a magic number, and "client:" with the match key that the tracker handed out, which is valid once. It is
random, so it is also the worker's question that the tuner's proof answers; the options behind it, which TVM allows, hold the tuner's nonce
and proof. The worker answers with its own proof. Frames are a length, an HMAC-SHA256 of their number and content, and the content: JSON,
then bytes. Nothing is encrypted, and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from tvm.rpc.base import RPC_CODE_MISMATCH, RPC_CODE_SUCCESS, RPC_MAGIC

from im2win.common.json_text import parsed
from im2win.tuner.fleet.secret import frame_key, proof, proves

PROTOCOL = 1
GREETING_S = 10.0  # seconds for a greeting, either side
LEAST_BYTES_S = 1 << 20  # bytes a second below which a frame is given up
HEAD_BYTES = 1 << 20  # most bytes of a frame's JSON
_GREETING_BYTES = 1024
_LENGTH, _HEAD = struct.Struct(">Q"), struct.Struct(">I")
_MAC_BYTES = 32


class ChannelError(RuntimeError):
    """A conversation that ended: closed, silent for too long, altered on its way, or against the protocol. The message says which."""


class TooLargeError(ChannelError):
    """A frame with more bytes than this side takes."""


def _received(sock: socket.socket, count: int, deadline: float) -> bytes:
    """So many bytes of a socket, before `deadline` (of time.monotonic)."""
    parts, left = [], count
    while left:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise ChannelError("nothing came in time")
        try:
            sock.settimeout(remaining)
            part = sock.recv(min(left, 1 << 20))
        except TimeoutError:
            raise ChannelError("nothing came in time") from None
        except OSError as error:
            raise ChannelError(f"the connection broke ({error.strerror})") from None
        if not part:
            raise ChannelError("the connection was closed")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _send(sock: socket.socket, data: bytes, seconds: float) -> None:
    try:
        sock.settimeout(seconds)
        sock.sendall(data)
    except OSError as error:  # a time-out among them
        raise ChannelError(f"the connection broke while sending ({error.strerror or error})") from None


class Channel:
    """A conversation after the greeting.

    Args:
        sock: a connected socket, closed by `close`.
        sends, receives: keys of the checksums of each direction.
        limit: most bytes of a frame that this side takes.
    """

    def __init__(self, sock: socket.socket, sends: bytes, receives: bytes, limit: int) -> None:
        self._sock, self._sends, self._receives, self.limit = sock, sends, receives, limit
        self._sent = self._taken = 0

    def fileno(self) -> int:
        """The socket's descriptor, for waiting."""
        return self._sock.fileno()

    def close(self) -> None:
        """Ends the conversation, also for a thread that waits for the other side."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def send(self, head: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """Sends JSON, and bytes behind it.

        Raises:
            ChannelError: the other side is gone, or takes nothing.
        """
        text = json.dumps({**head, "blobs": [len(blob) for blob in blobs]}, allow_nan=False).encode()
        content = b"".join((_HEAD.pack(len(text)), text, *blobs))
        mac = _checksum(self._sends, self._sent, content)
        self._sent += 1
        _send(self._sock, _LENGTH.pack(len(content)) + mac + content, GREETING_S + len(content) / LEAST_BYTES_S)

    def receive(self, seconds: float) -> tuple[dict[str, Any], list[bytes]]:
        """The next frame: its JSON and the bytes behind it.

        Args:
            seconds: how long to wait for its beginning.

        Raises:
            TooLargeError: it has more than `limit` bytes; nothing of them was read.
            ChannelError: nothing came in time, or what came was altered or is no frame.
        """
        size = _LENGTH.unpack(_received(self._sock, _LENGTH.size, time.monotonic() + seconds))[0]
        if size > self.limit:
            raise TooLargeError(f"a message of {size} bytes exceeds the limit of {self.limit} bytes")
        deadline = time.monotonic() + GREETING_S + size / LEAST_BYTES_S
        mac, content = _received(self._sock, _MAC_BYTES, deadline), _received(self._sock, size, deadline)
        if not hmac.compare_digest(mac, _checksum(self._receives, self._taken, content)):
            raise ChannelError("a message was altered on its way, or its sender does not know the secret")
        self._taken += 1
        return _split(content)


def _checksum(key: bytes, number: int, content: bytes) -> bytes:
    mac = hmac.new(key, _LENGTH.pack(number), hashlib.sha256)
    mac.update(content)
    return mac.digest()


def _split(content: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """JSON and bytes of a frame's content."""
    if len(content) < _HEAD.size:
        raise ChannelError("a message is too short")
    end = _HEAD.size + _HEAD.unpack(content[: _HEAD.size])[0]
    if not _HEAD.size <= end <= min(len(content), HEAD_BYTES):
        raise ChannelError("a message's head is too long")
    try:
        head = parsed(content[_HEAD.size : end])
    except ValueError as error:
        raise ChannelError(f"a message is no JSON ({error})") from None
    sizes = head.pop("blobs", None) if isinstance(head, dict) else None
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes) or sum(sizes) != len(content) - end:
        raise ChannelError("a message does not say what it holds")
    blobs = []
    for size in sizes:
        blobs.append(content[end : end + size])
        end += size
    return head, blobs


def new_match_key(key: str) -> str:
    """A match key for one conversation: the workers' key and 128 random bits."""
    return f"{key}:{secrets.token_hex(16)}"


def greet(sock: socket.socket, key: str, match_key: str, secret: bytes, limit: int) -> Channel:
    """The tuner's side of the greeting.

    Args:
        key: of the worker at the tracker.
        match_key: what the tracker handed out.
        limit: most bytes of a frame that this side takes.

    Raises:
        ChannelError: the worker refuses the match key or the proof, does not prove that it knows the secret, or is no worker.
    """
    nonce = secrets.token_hex(16)
    words = f"client:{match_key} -im2win={PROTOCOL} -nonce={nonce} -proof={proof(secret, 'tuner', match_key, nonce)}".encode()
    _send(sock, struct.pack("<ii", RPC_MAGIC, len(words)) + words, GREETING_S)
    deadline = time.monotonic() + GREETING_S
    code = struct.unpack("<i", _received(sock, 4, deadline))[0]
    if code == RPC_CODE_MISMATCH:
        raise ChannelError("the worker refuses this tuner: it has another secret, or another release of im2win")
    if code != RPC_CODE_SUCCESS:
        raise ChannelError("what answers there is no worker")
    answer = _text(sock, deadline).split()
    stated = _options(answer).get("proof", "")
    if answer[:1] != [f"server:{key}"] or not proves(stated, secret, "worker", match_key, nonce):
        raise ChannelError("the worker does not prove that it knows the secret; is it `im2win worker`, with the same one?")
    return Channel(sock, frame_key(secret, "tuner", match_key, nonce), frame_key(secret, "worker", match_key, nonce), limit)


def welcome(sock: socket.socket, key: str, match_key: str, secret: bytes, limit: int) -> Channel:
    """The worker's side of the greeting; arguments as for `greet`.

    Raises:
        ChannelError: the other side does not have the match key or does not prove that it knows the secret. It was told as TVM does.
    """
    deadline = time.monotonic() + GREETING_S
    if struct.unpack("<i", _received(sock, 4, deadline))[0] != RPC_MAGIC:
        raise ChannelError("what connected does not speak TVM's RPC")
    words = _text(sock, deadline).split()
    options = _options(words)
    nonce, stated = options.get("nonce", ""), options.get("proof", "")
    known = hmac.compare_digest(" ".join(words[:1]).encode(), f"client:{match_key}".encode())
    if not known or options.get("im2win") != str(PROTOCOL) or not proves(stated, secret, "tuner", match_key, nonce):
        _send(sock, struct.pack("<i", RPC_CODE_MISMATCH), GREETING_S)
        raise ChannelError("what connected does not know the secret" if known else "what connected has no valid match key")
    answer = f"server:{key} -proof={proof(secret, 'worker', match_key, nonce)}".encode()
    _send(sock, struct.pack("<ii", RPC_CODE_SUCCESS, len(answer)) + answer, GREETING_S)
    return Channel(sock, frame_key(secret, "worker", match_key, nonce), frame_key(secret, "tuner", match_key, nonce), limit)


def _text(sock: socket.socket, deadline: float) -> str:
    """A greeting's text, with its length before it."""
    size = struct.unpack("<i", _received(sock, 4, deadline))[0]
    if not 0 < size <= _GREETING_BYTES:
        raise ChannelError("a greeting is too long")
    return _received(sock, size, deadline).decode(errors="replace")


def _options(words: Sequence[str]) -> dict[str, str]:
    return {name[1:]: value for name, found, value in (word.partition("=") for word in words[1:]) if found and name.startswith("-")}
