"""Files of weights and directories of them."""
