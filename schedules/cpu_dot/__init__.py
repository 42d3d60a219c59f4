"""CPU schedules of int8, uint8 and bfloat16: dot products of words of neighbouring channels, by vector instructions or by AMX tiles."""
