"""Checkpoints: whole files or none. Room: keep.

Knows safetensors files and directories; knows nothing of training, plans or where bytes rest.
"""
