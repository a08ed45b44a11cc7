"""Models: `spec` names and validates them without torch, `build` makes them, one file per
family."""
