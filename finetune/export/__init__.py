"""`finetune export`: convert a checkpoint for timm, the Hugging Face hub, ONNX and torch.export."""
