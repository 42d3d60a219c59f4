"""Coverage-guided fuzzing of what reads files and keys, with atheris: `pip install im2win[fuzz]`.

    python tests/fuzz/readers.py [--seconds 60] [READER...]             each reader in a process of its own, one after the other
    python tests/fuzz/readers.py --input build/fuzz/record/crash-1a2b record       one input again

Readers are those of `tests/support/reader_targets.py`. The inputs that reach new code stay in build/fuzz/READER for the next run; an input
that brings out another error than the documented one is kept beside them. The exit status is 1 if there is one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
FOLDER = ROOT / "build" / "fuzz"


def instrumented(reader: str, options: list[str]) -> None:
    """Runs a reader under atheris; does not return."""
    import atheris

    with atheris.instrument_imports(include=["im2win"]):
        from reader_targets import TARGETS

    atheris.Setup([sys.argv[0], *options], TARGETS[reader].run)
    atheris.Fuzz()


def main() -> int:
    """Reads the command line, runs the readers. Returns the exit status."""
    from reader_targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("readers", nargs="*", metavar="READER", help=f"default: all of {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=int, default=60, help="for each reader")
    parser.add_argument("--input", type=Path, help="call the reader with this file alone")
    options = parser.parse_args()
    if unknown := set(options.readers) - set(TARGETS):
        parser.error(f"`READER` (={unknown.pop()}) must be one of {', '.join(TARGETS)}.")
    readers = options.readers or list(TARGETS)
    if options.input is not None:
        for reader in readers:
            TARGETS[reader].run(options.input.read_bytes())
        return 0
    failed = []
    for reader in readers:
        corpus = FOLDER / reader
        corpus.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(TARGETS[reader].seeds()):
            (corpus / f"seed-{number}").write_bytes(seed)
        limits = [f"-max_total_time={options.seconds}", "-max_len=20000", "-timeout=30", "-rss_limit_mb=4096"]
        limits.append(f"-artifact_prefix={corpus}/")
        print(f"--- {reader}", flush=True)
        if subprocess.run([sys.executable, __file__, "--run", reader, *limits, str(corpus)]).returncode:
            failed.append(reader)
    print(f"{len(readers)} readers, {len(failed)} with other errors than the documented ones{': ' if failed else ''}{', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        instrumented(sys.argv[2], sys.argv[3:])
    sys.exit(main())
