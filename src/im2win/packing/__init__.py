"""Filter packing: the layouts in which kernels read filters, computed ahead of time (numpy only, no compiler)."""
