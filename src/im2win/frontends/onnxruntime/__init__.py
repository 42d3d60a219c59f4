"""ONNX models for ONNX Runtime, with their convolutions on im2win's kernels."""
