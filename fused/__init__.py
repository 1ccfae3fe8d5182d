"""The fast and long parts of the model: attention kernels and the chunked head."""
