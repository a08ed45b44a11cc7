"""Submission, checks and execution of jobs on a SLURM cluster, and plans of many runs. The job
scripts are `*.slurm`."""
