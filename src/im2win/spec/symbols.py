"""Names of the functions in a library: what code generators call them, and the runtime looks for."""

SYMBOL = "conv2d"
TRANSFORM, TRANSFORM_PARTS = "transform", "transform_parts"  # see `runtime.cuda.Kernels`
