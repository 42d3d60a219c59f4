"""CUDA schedules of Winograd on tensor cores with partial kernel fusion (PKF), the kernels of "面向现代GPU的Winograd卷积加速研究"."""
