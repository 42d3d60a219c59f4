"""Built convolutions for programs that have no Python."""
