"""The peers: libraries that im2win is compared with."""
