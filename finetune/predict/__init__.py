"""What a classifier answers for any pictures, with or without labels: `finetune predict`."""
