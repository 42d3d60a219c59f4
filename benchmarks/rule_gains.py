"""What each of the reconstructor's rules gains on TVM's CUDA schedules, and what racecheck finds in their kernels.

    python benchmarks/rule_gains.py --json benchmarks/studies/DEVICE/rule-gains.json

Its table is filled by `im2win report`. A run that is stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

from im2win.codegen.llvm import ToolchainError
from im2win.common.files import replace_json
from im2win.device.gpu import NoGpuError
from im2win.studies import rule_gains


def main() -> None:
    """Reads the command line, measures, writes the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.1, help="that a kernel's timed calls take, about")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which no further problem is begun")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    try:
        before = json.loads(options.json.read_text()) if options.json.exists() else None
        options.json.parent.mkdir(parents=True, exist_ok=True)
        keep, how = partial(replace_json, options.json), {"rounds": options.rounds, "seconds": options.seconds, "limit_s": options.limit}
        keep(rule_gains.run(rule_gains.problems(options.batch), **how, before=before, keep=keep, note=partial(print, flush=True)))
    except (ValueError, NoGpuError, ToolchainError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
