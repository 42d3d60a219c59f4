"""The rules that legal tiles obey, by family."""
