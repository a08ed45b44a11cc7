"""What a classifier answers on a split and how good that is: `finetune evaluate`."""
