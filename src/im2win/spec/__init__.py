"""What is asked for: the convolution, suites of layers, the objective."""
