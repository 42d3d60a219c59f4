"""Reads ONNX graphs: their layers and shapes."""
