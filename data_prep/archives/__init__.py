"""Code that several archive layouts share: folders, compressed tars, label tables, the
inventory."""
