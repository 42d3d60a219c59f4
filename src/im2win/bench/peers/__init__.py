"""Who we are compared with."""
