"""Performance-critical parts of the model: attention kernels, the chunked head, matmuls."""
