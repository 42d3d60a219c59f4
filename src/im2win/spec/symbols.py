"""Names of the functions in a library, which code generators define and the runtime loads."""

SYMBOL = "conv2d"
TRANSFORM, TRANSFORM_PARTS = "transform", "transform_parts"  # see `runtime.cuda.Kernels`
