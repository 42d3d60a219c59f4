"""What the threads of a kernel read and write, address by address."""
