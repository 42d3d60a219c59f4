"""The `im2win` command."""
