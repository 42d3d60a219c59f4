"""Post-processing of generated CUDA source by rules that are data: matched by regular expression, counted, and refused when they do not fit."""

from im2win.reconstruct.rules import Match, Reconstruction, ReconstructError, Rule, reconstruct

__all__ = ["Match", "ReconstructError", "Reconstruction", "Rule", "reconstruct"]
