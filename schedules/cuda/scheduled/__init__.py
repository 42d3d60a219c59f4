"""CUDA schedules of the definitions in `compute`: TVM binds their loops to thread blocks and threads, and inserts barriers."""
