"""The NVMe tier: named extents in files or on raw block devices."""
