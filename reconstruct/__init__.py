"""Post-processing of generated CUDA by rules that are data: matched by regular expression, counted, refused when they do not fit."""

from im2win.reconstruct.rules import Match, ReconstructError, Reconstruction, Rule, reconstruct

__all__ = ["Match", "ReconstructError", "Reconstruction", "Rule", "reconstruct"]
