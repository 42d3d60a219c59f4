"""Which algorithms there are, and how each is scheduled, ranked and built on a device."""
