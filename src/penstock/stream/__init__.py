"""Moving blocks past the device that computes. Room: move."""
