"""`finetune import`: convert weights of other projects to a folder that every command can read."""
