"""Rewrites ONNX models for ONNX Runtime so that their convolutions run on im2win's kernels."""
