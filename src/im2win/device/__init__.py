"""What a schedule needs to know of the CPU or GPU it is for."""
