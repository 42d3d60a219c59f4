"""The verbs of the command line, one in each file. Each imports its dependencies when it runs, so that `im2win --help` starts at once."""
