"""Loads and runs built operators and models. Needs numpy and the TVM runtime, never the compiler."""
