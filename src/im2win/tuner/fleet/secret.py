"""The secret that tuner and workers of a fleet share, the proofs that they know it, and the addresses that need it."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import socket
import stat
from pathlib import Path

VARIABLE = "IM2WIN_SECRET"
LEAST_BYTES = 16


class SecretError(ValueError):
    """A secret that is missing, too short, or open to other users. The message says what to do."""


def read_secret(file: str | os.PathLike[str] | None = None) -> bytes:
    """The secret in a file, or in the environment variable `IM2WIN_SECRET`; empty if there is neither. Space around it does not count.

    Raises:
        SecretError: it has fewer than `LEAST_BYTES` bytes, or the file cannot be read or can be read by other users.
    """
    if file is None:
        given, name = os.environ.get(VARIABLE, "").encode(), f"the secret in {VARIABLE}"
        if VARIABLE not in os.environ:
            return b""
    else:
        given, name = _content(Path(file)), f"the secret in `{file}`"
    secret = given.strip()
    if len(secret) < LEAST_BYTES:
        raise SecretError(f"{name} ({len(secret)} bytes) must have at least {LEAST_BYTES} bytes; `openssl rand -hex 32` prints a good one.")
    return secret


def _content(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        content = path.read_bytes()
    except OSError as error:
        raise SecretError(f"the secret's file `{path}` cannot be read ({error.strerror}).") from None
    if hasattr(os, "getuid") and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SecretError(f"the secret's file `{path}` must be closed to other users: chmod 600 {path}.")
    return content


def proof(secret: bytes, who: str, match_key: str, nonce: str) -> str:
    """What only one who knows the secret can say as `who` ("tuner" or "worker") in the conversation with this match key and nonce."""
    return _mac(secret, "proof", who, match_key, nonce).hex()


def frame_key(secret: bytes, who: str, match_key: str, nonce: str) -> bytes:
    """The key of the checksums of all that `who` sends in a conversation."""
    return _mac(secret, "frames", who, match_key, nonce)


def _mac(secret: bytes, *words: str) -> bytes:
    return hmac.new(secret, "\n".join(("im2win fleet", *words)).encode(), hashlib.sha256).digest()


def proves(stated: str, secret: bytes, who: str, match_key: str, nonce: str) -> bool:
    """Whether a stated proof is right; the time that this takes does not depend on how much of it is."""
    return hmac.compare_digest(stated.encode(), proof(secret, who, match_key, nonce).encode())


def is_loopback(host: str) -> bool:
    """Whether every address of a host is of this machine alone."""
    try:
        found = {str(address[4][0]).partition("%")[0] for address in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(one).is_loopback for one in found)


def check_reach(host: str, secret: bytes, what: str) -> None:
    """Raises SecretError for an address beyond loopback without a secret."""
    if not secret and not is_loopback(host):
        raise SecretError(
            f"{what} (={host!r}) lies beyond loopback, where a worker and a tuner need a shared secret: name its file with --secret-file, "
            f"or put it into {VARIABLE}."
        )
