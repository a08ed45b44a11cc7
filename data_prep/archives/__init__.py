"""Code that several archive layouts share: file listings, compressed tars, label tables, and the
inventory of inputs."""
