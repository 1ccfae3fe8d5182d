"""Read and check settings before anything else."""
