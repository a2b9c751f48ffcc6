"""One optimizer step over chunks of parameters. Room: update.

`AdamW`, `SGD` and `Lion` are `torch.optim` optimizers; `sweep` is what the engine calls; `formats`
says how states are stored and `reference` what every step must give, to the bit.
"""

from penstock.optim.optimizers import SGD, AdamW, Lion

__all__ = ["AdamW", "SGD", "Lion"]
