"""The loop over the sum's steps: copies that run ahead of products."""
