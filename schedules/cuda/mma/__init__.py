"""Products: on CUDA cores, by a warp's and by a warpgroup's tensor-core instructions."""
