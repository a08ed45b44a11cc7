"""What archives are made of, whatever their layout: folders, zips, compressed tars, the inventory
of all that they hold."""
