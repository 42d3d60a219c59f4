"""CPU schedules of depthwise layers: vectors of channels, or of neighbouring windows, and sums over a kernel's taps only."""
