"""Fleets: several workers, on this machine or others, that measure one session's candidates from one queue.

TVM's RPC tracker says which workers are free. What a tuner and a worker say to each other after TVM's greeting is im2win's own: TVM's
sessions give whoever is connected every function and all memory of the server, without limits.
"""
