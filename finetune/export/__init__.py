"""A checkpoint in the formats of others: `finetune export`."""
