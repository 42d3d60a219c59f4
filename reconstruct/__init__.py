"""Rewriting of the CUDA that TVM generates: it deletes needless barriers, fuses kernels and translates to HIP.

parse: the model of a source: expressions, statements, kernels, launches.
trace: the memory accesses of all threads of a kernel, enumerated.
rules: rewrites of single kernels: barriers, HIP.
fusion: partial kernel fusion (PKF) of two kernels.
validate: tests of a rewritten source on the emulator and with racecheck.
rulesets: the registry of rule sets by name, and `rewrite`, which applies them.
text_rules: rules that are regular expressions.

A rule set that does not apply leaves the source unchanged.

Source: the PKF-Reconstructor of "面向现代GPU的Winograd卷积加速研究" (Winograd convolution for modern GPUs), which fuses the stages of
Winograd convolution (Lavin and Gray 2015, arXiv 1509.09308) in CUDA that TVM generates. The modules call it the PKF paper.
"""

from im2win.reconstruct.text_rules import Match, ReconstructError, Reconstruction, Rule, reconstruct

__all__ = ["Match", "ReconstructError", "Reconstruction", "Rule", "reconstruct"]
