"""`penstock train`: one run, from settings to a folder of results.

docs/train.md tells it to users.
"""
