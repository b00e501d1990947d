"""More than one replica of a model behind one address.

A request's way: front (gate, prefix_routing) → a replica, which is the server of `shoal.server` on a socket of its own.
"""
