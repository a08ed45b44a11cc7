"""Code around jobs on a SLURM cluster: checks of the site and of each node, plans of many runs. The
jobs are `*.slurm`."""
