"""Models: `spec` validates settings without torch, and `build` makes the modules. Each model family
has one file."""
