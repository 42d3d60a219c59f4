"""Compiles whole ONNX models into one library: im2win's kernels for convolutions and products, TVM for the rest.

Memory is planned and filters are packed ahead of time. Alternatively a model becomes a graph and a library of operators for ONNX Runtime,
which then calls im2win's convolutions and runs everything else itself.
"""
