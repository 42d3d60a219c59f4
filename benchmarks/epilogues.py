"""What fused activations cost: every convolution of networks that has one, with it and without it.

    python benchmarks/epilogues.py --json benchmarks/studies/DEVICE/epilogues.json [NETWORK...]

The layers are those that `im2win.torch.optimize` would build for the networks with one image, with everything that is fused into them.
Layers that the file already holds with today's kernels, on the same device, are not timed again. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from im2win.bench.source import digests
from im2win.bench.zoo_networks import NETWORKS, built, images
from im2win.common.files import replace_json
from im2win.device.cpu import Machine
from im2win.frontends.torch.optimizing import problems
from im2win.records.record import utc_now
from im2win.studies.confirmation import held
from im2win.studies.entries import EPILOGUES, SCHEMA
from im2win.studies.epilogues import measure

DEFAULT = ["efficientnet_b0", "convnext_tiny", "mobilenetv3_large_100"]


def main() -> None:
    """Reads the command line, measures, writes the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("networks", nargs="*", default=DEFAULT, metavar="NETWORK", help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if unknown := [name for name in options.networks if name not in NETWORKS]:
        parser.error(f"`NETWORK` (={unknown[0]}) must be one of {', '.join(NETWORKS)}.")
    found = [conv for name in options.networks for conv, _ in problems(built(name), images(name, 1))]

    def note(done: int, row: dict[str, Any]) -> None:
        cost = f"{100 * row['cost']:.0f} %" if "cost" in row else row["failed"]
        print(f"{done}/{len(new)} {row['conv']}: {cost}", flush=True)

    facts = {"study": EPILOGUES, "schema": SCHEMA, "device": Machine.host().name, "networks": options.networks}
    before = {row["conv"]: row for row in held(options.json, "layers", facts)}
    convs = [conv for conv in dict.fromkeys(found) if conv.activation != "none"]
    new = [conv for conv in convs if str(conv) not in before]
    measured = {row["conv"]: row for row in measure(new, rounds=options.rounds, progress=note)}
    rows = [(before | measured)[str(conv)] for conv in convs]
    replace_json(options.json, {**facts, "date": utc_now(), "digests": digests("cpu"), "layers": rows})


if __name__ == "__main__":
    main()
