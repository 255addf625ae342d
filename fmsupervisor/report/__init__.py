"""One module per audience: systemd, Prometheus, journald, the person at a terminal."""
