"""Rewriting of the CUDA that TVM generates: needless barriers, partial kernel fusion, HIP.

`unit` is the model of a source, `trace` what its threads read and write, `barriers`, `shmem`, `llc` and `hip` the rules, `search` and
`judges` what confirms them, `rulesets` the names by which all of them are asked for. A rule that does not fit changes nothing.
"""

from im2win.reconstruct.rules import Match, ReconstructError, Reconstruction, Rule, reconstruct

__all__ = ["Match", "ReconstructError", "Reconstruction", "Rule", "reconstruct"]
