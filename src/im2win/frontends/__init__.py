"""Frontends for networks of other frameworks: ONNX models, ONNX Runtime, PyTorch."""
