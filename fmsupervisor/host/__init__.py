"""One module per kernel interface: what the host shows, and what may be done to it."""
