"""What runs around a job on a SLURM cluster: checks of the site and of each node, sweeps, whole studies. The jobs are `*.slurm`."""
