"""Networks of other frameworks: ONNX models, ONNX Runtime, PyTorch."""
