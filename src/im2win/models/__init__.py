"""Whole ONNX models as one library: convolutions and products by im2win's kernels, the rest by TVM, memory planned, filters packed."""
