"""A finished build for other tools: its package as QDQ ONNX models, with encodings and test vectors."""
