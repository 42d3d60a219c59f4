"""What fused activations cost: every convolution of networks that has one, with it and without it.

    python benchmarks/epilogues.py --json benchmarks/studies/DEVICE/epilogues.json [NETWORK...]

The layers are those that `im2win.torch.optimize` would build for the networks with one image, with everything that is fused into them.
Nothing else should run meanwhile.
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
from im2win.reports.epilogues import STUDY
from im2win.studies.entries import SCHEMA
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
    convs = [conv for conv in dict.fromkeys(found) if conv.activation != "none"]

    def note(done: int, row: dict[str, Any]) -> None:
        cost = f"{100 * row['cost']:.0f} %" if "cost" in row else row["failed"]
        print(f"{done}/{len(convs)} {row['conv']}: {cost}", flush=True)

    facts = {"device": Machine.host().name, "networks": options.networks, "date": utc_now(), "digests": digests("cpu")}
    rows = measure(convs, rounds=options.rounds, progress=note)
    replace_json(options.json, {"study": STUDY, "schema": SCHEMA, **facts, "layers": rows})


if __name__ == "__main__":
    main()
