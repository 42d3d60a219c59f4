"""Rewriting of the CUDA that TVM generates: needless barriers, partial kernel fusion, HIP.

`parse` is the model of a source, `trace` what its threads read and write, `rules` and `fusion` what changes it, `validate` what confirms
changes, `rulesets` the names by which all of them are asked for. A rule that does not fit changes nothing.
"""

from im2win.reconstruct.text_rules import Match, ReconstructError, Reconstruction, Rule, reconstruct

__all__ = ["Match", "ReconstructError", "Reconstruction", "Rule", "reconstruct"]
