"""`pretrain start`: from a folder of pictures, or a dataset, to a config with its reasons and the command that trains."""
