"""A model whose weights stream from the tiers, with a forward pass that autograd differentiates."""
