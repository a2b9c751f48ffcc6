"""The NVMe tier: extents on files or raw devices. Room: hold."""
