"""Checkpoints: safetensors files and directories that are complete or absent.

This package knows nothing of training, of plans, or of the tier that a tensor lives in.
"""
