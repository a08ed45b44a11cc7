"""What `cluster/doctor` looks at before anything is queued: the site, SLURM, file systems, one job, nodes. No dependencies."""
