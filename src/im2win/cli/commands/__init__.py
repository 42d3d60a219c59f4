"""The verbs of the command line, one a file; each imports what it needs when it runs, so that `im2win --help` starts at once."""
