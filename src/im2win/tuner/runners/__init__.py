"""The tuner's measuring processes, one module for each kind of device."""
