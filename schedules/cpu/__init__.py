"""CPU schedules: vectorised, parallel and unrolled loops over packed filters."""
