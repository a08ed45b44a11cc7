"""Parts that archive layouts share: folders, compressed tars, label tables, the inventory."""
