"""Fine-tuning, `finetune tune`: another task for the one training loop."""
