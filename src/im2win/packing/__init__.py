"""Filter packing: the layouts in which kernels read filters, made ahead of time (numpy only, no compiler)."""
