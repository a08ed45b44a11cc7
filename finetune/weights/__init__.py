"""`finetune import`: weights of other projects become a folder that every command reads."""
