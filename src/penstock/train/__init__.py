"""`penstock train`: run a training from its settings to the trained model.

`session` is the entry point; `loop` takes the steps. docs/train.md is the user's guide.
"""
