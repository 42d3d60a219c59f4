"""Options that several verbs share, defined once so that they mean the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from im2win.cli.commands import completion, outputs
from im2win.spec import accuracy

ACCURACY = (
    "exact (IEEE float32 sums), float32 (about as accurate: Winograd too, and on a GPU TF32 products in parts), tf32 (on a GPU) "
    "or winograd (on a GPU: Winograd in float16 and int8, too)."
)

WHAT = "A named suite, an ONNX file, a file of captured layers or the key of one layer."
What = Annotated[str, typer.Argument(metavar="SUITE|MODEL.onnx|LAYERS.jsonl|KEY", help=WHAT, autocompletion=completion.suites)]
Batch = Annotated[int | None, typer.Option(help="Images at once, instead of what the suite or model says.")]
Layers = Annotated[str | None, typer.Option(metavar="A,B", help="Only these layers, by name.")]
Algorithm = Annotated[
    str, typer.Option(help="One of `im2win algorithms`, or auto: all that support the layer.", autocompletion=completion.algorithms)
]
Threads = Annotated[int | None, typer.Option(help="CPU threads; all that this process may use if not said.")]
Machine = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="An Arm CPU to compile for, such as neoverse-n1, instead of this machine's.", show_default=False),
]
Target = Annotated[str, typer.Option(help="cpu or cuda.", autocompletion=completion.choices("cpu", "cuda"))]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32, float16, bfloat16, int8, uint8 or float8_e4m3fn, instead of what the suite or model says.",
        autocompletion=completion.choices("float32", "float16", "bfloat16", "int8", "uint8", "float8_e4m3fn"),
    ),
]
OutDtype = Annotated[
    str | None,
    typer.Option(
        "--out-dtype",
        help="Of outputs of int8 and uint8: int32, or int8, uint8, float16, bfloat16 or float32, scaled by channel. "
        "Of float8_e4m3fn: float16, bfloat16, float32 or float8_e4m3fn, scaled by channel.",
    ),
]
Layout = Annotated[
    str | None,
    typer.Option(help="NCHW or NHWC, instead of what the suite or model says.", autocompletion=completion.choices("NCHW", "NHWC")),
]
Accuracy = Annotated[str, typer.Option(help=ACCURACY, autocompletion=completion.choices(*get_args(accuracy.Accuracy)))]
TrialsOfUntuned = Annotated[
    int | None, typer.Option("--trials", min=1, help="Tune each layer first that has no record of this device, with so many candidates.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, as docs/command_line.md describes it.")]
LOGS = "Folder of tuning records, searched before your own, which `im2win device` shows."
Logs = Annotated[Path | None, typer.Option(metavar="DIR", help=LOGS)]
WrittenLogs = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder for the records, instead of your own.", callback=outputs.folder)
]
Key = Annotated[str, typer.Option(help="What the workers register with, and tuners ask for.")]
SecretFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The secret that tuner and workers share, closed to others; IM2WIN_SECRET if not said.")
]
