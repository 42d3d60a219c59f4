"""`im2win worker`: measures for tuners on other machines, or other processes of this one, which find it at TVM's RPC tracker."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Annotated

import typer

from im2win.cli.commands import completion, options

MIB = 1 << 20


def worker(
    tracker: Annotated[str, typer.Option(metavar="HOST:PORT", help="TVM's RPC tracker (`python -m tvm.exec.rpc_tracker`).")],
    key: options.Key = "im2win",
    device: Annotated[
        str, typer.Option(help="cpu, cuda or cuda:N, the GPU with this number.", autocompletion=completion.choices("cpu", "cuda", "cuda:1"))
    ] = "cpu",
    threads: options.Threads = None,
    host: Annotated[str, typer.Option(help="Address to listen on, as tuners reach it. Beyond loopback a secret is needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any that is free.")] = 0,
    secret_file: options.SecretFile = None,
    upload_limit: Annotated[int, typer.Option(metavar="MIB", min=1, help="Most MiB that a tuner may send at once.")] = 256,
    tensor_limit: Annotated[int, typer.Option(metavar="MIB", min=1, help="Most MiB of a problem's tensors.")] = 8192,
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="A job's process is ended after so long.")] = 600,
) -> None:
    """Measure kernels for `im2win tune --tracker HOST:PORT --key KEY`, until Ctrl-C.

    A tuner that knows the secret runs code here with your rights. See SECURITY.md before you listen beyond loopback.
    """
    from im2win.tuner.fleet.messages import Limits
    from im2win.tuner.fleet.secret import VARIABLE, read_secret
    from im2win.tuner.fleet.server import Server, on_device
    from im2win.tuner.fleet.tracker import address

    where, secret = address(tracker), read_secret(secret_file)
    os.environ.pop(VARIABLE, None)  # the processes that run what tuners send do not need it
    found, environment = on_device(device, threads)
    limits = Limits(upload_limit * MIB, tensor_limit * MIB, time_limit)
    with contextlib.closing(
        Server(found, key, where, host=host, port=port, secret=secret, limits=limits, environment=environment)
    ) as server:
        told = "with a secret" if secret else "without a secret"
        logging.getLogger("im2win").setLevel(logging.INFO)  # who comes and goes, in a terminal as well
        typer.echo(f"{server.key} listens on {host}:{server.port} {told}, for the tracker {tracker}.")
        server.serve()
