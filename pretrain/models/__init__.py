"""Models. `spec` validates their settings without torch; `build` makes them. Each family has one
file."""
