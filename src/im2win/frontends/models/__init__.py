"""Whole ONNX models as one library: convolutions and products by im2win's kernels, the rest by TVM, memory planned, filters packed.

Or as a graph and a library of operators for ONNX Runtime, which then has im2win's convolutions and runs the rest itself.
"""
