"""The measuring processes of the tuner, one for each kind of device."""
