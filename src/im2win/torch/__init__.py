"""im2win for PyTorch: `optimize` a module, `capture` the layers that a program runs, and the operator `torch.ops.im2win.conv2d`."""

from im2win.frontends.torch import conv_op as conv_op
from im2win.frontends.torch.capturing import capture
from im2win.frontends.torch.optimizing import optimize, repack
from im2win.frontends.torch.report import LayerReport, Report

__all__ = ["LayerReport", "Report", "capture", "optimize", "repack"]
