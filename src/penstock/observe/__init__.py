"""Where memory and time go, second by second, in any PyTorch program. Room: show."""
