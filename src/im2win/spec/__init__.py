"""Specification of what is computed: the convolution, suites of layers, activations, element types, accuracy, the objective."""
