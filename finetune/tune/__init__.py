"""Fine-tuning (`finetune tune`) with the training loop of `pretrain`."""
