"""The `im2win` command: its verbs, and the one place that turns a bad input into one line on stderr and exit status 2."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, NoReturn, TextIO

import typer

from im2win import __version__
from im2win.cli.commands import (
    ablation,
    bench,
    build,
    demo,
    explain,
    facts,
    layers,
    logs,
    models,
    onnxruntime,
    quantize,
    reconstruct,
    report,
    runtime,
    tune,
    worker,
)
from im2win.cli.log_lines import log_lines
from im2win.common.torch_import import keep_from_tvm, needed

BAD_INPUT, INTERRUPTED, TERMINATED = 2, 130, 143

app = typer.Typer(
    name="im2win",
    help="The fastest correct convolution for a layer on this machine, with the memory it costs, ready to deploy.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

VERBS: list[Callable[..., None]] = [
    layers.layers, quantize.quantize, tune.tune, worker.worker, explain.explain, build.build, models.compile_, models.run,
    onnxruntime.onnxruntime, runtime.runtime, bench.bench, ablation.ablation, report.report,
    reconstruct.reconstruct, facts.algorithms, facts.device, demo.demo,
]  # fmt: skip
for verb in VERBS:
    app.command(name=verb.__name__.rstrip("_"))(verb)
app.add_typer(logs.app, name="logs")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"im2win {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
) -> None:
    """Options of every verb; `main` reads `--debug` itself, because it must hold even where parsing fails."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 2 bad input (one line on stderr), 130 interrupted, 143 terminated."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminated)
    if not needed():
        keep_from_tvm()
    try:
        with log_lines():
            status = app(args=words or ["--help"], prog_name="im2win", standalone_mode=False)
        print(end="", flush=True)  # here, where a closed pipe is understood, not when the interpreter ends
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except SystemExit as ended:  # the parser and rich's console turn a closed pipe into status 1; completion ends so, too
        if isinstance(ended.__context__, BrokenPipeError):
            _closed()
        raise
    except BrokenPipeError:
        _closed()
    except (typer.TyperException, ValueError, OSError, ImportError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not type(error).__module__.startswith("im2win."):
            raise  # not one of im2win's messages to the user, but a defect
        try:
            if "--debug" in words:
                traceback.print_exc()
            print(f"im2win: {_line(error)}", file=sys.stderr)
        except BrokenPipeError:  # nobody reads the message; the status tells
            _discard(sys.__stderr__)
        sys.exit(BAD_INPUT)
    sys.exit(status if isinstance(status, int) else 0)


def _terminated(signum: int, frame: object) -> NoReturn:
    """Ends as an exception does, so that workers and temporary folders go, too."""
    sys.exit(TERMINATED)


def _closed() -> NoReturn:
    """Ends as if all were printed: the reader of the output had enough, as in `im2win layers resnet50 | head`."""
    _discard(sys.__stdout__)
    sys.exit(0)


def _discard(stream: TextIO | None) -> None:
    """Sends what is still to be written to a stream nowhere, so that the interpreter's end does not fail on it."""
    if stream is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _line(error: Exception) -> str:
    """The error as one line. Errors of im2win, the parser and the system already name the argument and the rule."""
    if isinstance(error, ModuleNotFoundError):
        return f"this needs the Python module {error.name!r}, which is not installed; see the extras in README.md."
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}."
    text = error.format_message() if isinstance(error, typer.TyperException) else str(error)
    return " ".join(text.split()) or type(error).__name__
