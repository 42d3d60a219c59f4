"""Memory accesses of all threads of a kernel, enumerated address by address."""
