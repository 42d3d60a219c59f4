"""Search spaces: tiles worth a trial, by family."""
