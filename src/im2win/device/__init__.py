"""Facts about the CPU or GPU that a schedule is built for."""
