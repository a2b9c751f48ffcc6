"""Host memory on chosen NUMA nodes: allocation, placement and pinning."""
