"""Parameters of CUDA schedules (tiles), and the layout of their halo tiles in shared memory."""
