"""Make datasets: convert image archives to verified WebDataset shards with an index and a
manifest."""

import os

# MLflow, the Hugging Face Hub and ONNX Runtime would send usage data from the user's machine
os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__version__ = "0.2.0"
