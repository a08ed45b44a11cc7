"""Third floor: what a pretrained checkpoint is for. Linear probe, fine-tuning, evaluation, over the same data contract and loop."""
