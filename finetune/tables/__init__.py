"""What our runs reached beside what the papers print: `finetune table`."""
