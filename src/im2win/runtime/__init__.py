"""Loading and running what was built; needs numpy and the TVM runtime, never the compiler."""
